// The timeline's picture.

const LABELS = { wide: 108, narrow: 64 };

/** Return the fills of phases and messages, made once per picture. */
function timelineFills(context) {
  return PHASE_COLOURS.map((name) => fillOf(context, name));
}

/** Draw rows of bars, and the axis below them. */
function drawTimeline(canvas, report, rows, view, chosen, hidden) {
  const last = rows[rows.length - 1];
  const height = last.top + last.height + AXIS + 8;
  const { context, width } = contextOf(canvas, height);
  const left = width < 600 ? LABELS.narrow : LABELS.wide;
  const scale = (width - left) / (view.to - view.from);
  const place = { left, width, scale, x: (seconds) => left + (seconds - view.from) * scale };
  context.clearRect(0, 0, width, height);
  drawAxis(context, view, place, height);
  const fills = timelineFills(context);
  for (const row of rows) {
    drawLabel(context, row, left);
    context.save();
    context.beginPath();
    context.rect(left, row.top, width - left, row.height);
    context.clip();
    context.fillStyle = colourOf("soft");
    context.fillRect(left, row.top, width - left, row.height);
    drawItems(context, report, row, view, place, fills, hidden);
    context.restore();
  }
  if (chosen) drawChosen(context, report, rows, place, chosen);
  return place;
}

function drawAxis(context, view, place, height) {
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (const tick of ticks(view.from, view.to, Math.max(2, place.width / 160))) {
    const x = place.x(tick);
    context.fillStyle = colourOf("line");
    context.fillRect(x, 0, 1, height - AXIS + 4);
    context.fillStyle = colourOf("quiet");
    const text = secondsText(Number(tick.toPrecision(12)));
    const half = context.measureText(text).width / 2;
    const inside = Math.min(Math.max(x, place.left + half), place.width - half);
    context.fillText(text, inside, height - 6);
  }
}

function drawLabel(context, row, left) {
  context.fillStyle = colourOf(row.link ? "quiet" : "text");
  context.font = `${row.link ? 10 : 12}px system-ui, "Segoe UI", sans-serif`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText(clipped(context, row.name, left - 8), left - 6, row.top + row.height / 2);
}

/** Return as much of a text as fits. */
function clipped(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let kept = text;
  while (kept && context.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
  return kept ? `${kept}…` : "";
}

/** Draw the bars of a row that are in view; what falls on a drawn pixel adds nothing. */
function drawItems(context, report, row, view, place, fills, hidden) {
  const columns = row.link ? report.messages : report.bars;
  const { items } = row;
  const first = firstNotBelow(items.length, (i) => columns.start_s[items[i]], view.from - row.longest);
  const drawn = fills.map(() => -1);
  for (let i = first; i < items.length; i += 1) {
    const item = items[i];
    const x = place.x(columns.start_s[item]);
    if (x > place.width) break;
    const phase = row.link ? PHASE_COLOURS.length - 1 : columns.phase[item];
    const end = x + columns.seconds[item] * place.scale;
    if (end < place.left || hidden.has(phase)) continue;
    if (end <= drawn[phase] && !columns.critical[item]) continue;
    context.fillStyle = fills[phase];
    const thick = Math.max(end - x, 0.5);
    context.fillRect(x, row.top, thick, row.height);
    drawn[phase] = Math.max(drawn[phase], Math.ceil(end));
    if (thick > 3) outline(context, x, row, thick);
    if (columns.critical[item]) drawCritical(context, row, x, thick);
    if (!row.link && thick > 16) drawText(context, columns, item, row, x, thick);
  }
}

function outline(context, x, row, thick) {
  context.fillStyle = colourOf("back");
  context.fillRect(x + thick - 0.5, row.top, 0.5, row.height);
}

/** Mark what is on the critical path: a line along the lower edge. */
function drawCritical(context, row, x, thick) {
  const line = row.link ? 3 : 4;
  context.fillStyle = colourOf("mark");
  context.fillRect(x, row.top + row.height - line, thick, line);
}

function drawText(context, columns, item, row, x, thick) {
  const phase = columns.phase[item];
  const piece = columns.piece[item] < 0 ? "" : String(columns.piece[item]);
  const text = thick > 70 ? [piece, columns.name[item]].filter(Boolean).join(" ") : piece;
  if (!text) return;
  context.font = '11px system-ui, "Segoe UI", sans-serif';
  context.textAlign = "left";
  context.textBaseline = "middle";
  const room = Math.max(x, 0);
  const shown = clipped(context, text, thick - 8);
  const paper = context.measureText(shown).width;
  context.fillStyle = colourOf(PHASE_COLOURS[phase]);
  context.fillRect(room + 2, row.top + 7, paper + 4, 14); // no pattern behind letters
  context.fillStyle = colourOf(phase === 0 ? "on-forward" : "on-bar");
  context.fillText(shown, room + 4, row.top + 14);
}

function drawChosen(context, report, rows, place, chosen) {
  const row = rows.find((each) => !each.link && each.device === report.bars.device[chosen.op]);
  if (!row) return;
  const x = Math.max(place.left, place.x(report.bars.start_s[chosen.op]));
  const end = place.x(report.bars.start_s[chosen.op] + report.bars.seconds[chosen.op]);
  if (end < place.left) return;
  context.strokeStyle = colourOf("text");
  context.lineWidth = 2;
  context.strokeRect(x - 1, row.top - 2, Math.max(end - x, 2) + 2, row.height + 4);
}
