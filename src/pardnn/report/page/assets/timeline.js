// The timeline: devices and links over simulated time.

const HELP =
  "Keys: + and − zoom, ← and → move, 0 shows all, “,” and “.” go to the op before and after, " +
  "↑ and ↓ to another device. Drag to move, Ctrl and wheel to zoom.";

class Timeline {
  constructor(report, place) {
    this.simulated = report;
    this.take(report);
    this.hidden = new Set();
    this.chosen = null;
    this.canvas = make("canvas", { role: "img", tabindex: "0", "aria-label": this.label() });
    this.state = make("p", { class: "quiet", id: "timeline-state", "aria-live": "polite" });
    this.hover = make("p", { class: "quiet", id: "timeline-hover" }, "\u00a0");
    this.detail = make("div", { class: "detail", id: "op-detail", "aria-live": "polite" });
    this.detail.hidden = true;
    place.append(
      this.controls(), this.canvas, this.hover, this.state, this.detail,
      make("p", { class: "quiet" }, HELP),
    );
    this.listen();
    redraws.push(() => this.draw());
    this.draw();
  }

  /** Draw these times: the simulated ones, or those of a run. */
  take(report) {
    this.report = report;
    this.rows = timelineRows(report);
    this.view = new View(report.times.makespan_s);
  }

  label() {
    const step = secondsText(this.report.times.makespan_s);
    return `Timeline of ${this.report.devices.length} devices over ${step}; the tables tell the same.`;
  }

  controls() {
    const bar = make("div", { class: "bar" });
    this.report.phases.slice(0, 4).forEach((phase, number) => {
      const toggle = button(key(PHASE_COLOURS[number], phase), `Show ${phase}`, () => {
        const isHidden = this.hidden.delete(number) || !this.hidden.add(number);
        toggle.setAttribute("aria-pressed", String(isHidden));
        this.draw();
      });
      toggle.setAttribute("aria-pressed", "true");
      bar.append(toggle);
    });
    if (this.simulated.measured) bar.append(this.timesSelect());
    bar.append(
      key("message", "message"), key("mark", "critical path"),
      button("+", "Zoom in", () => this.zoom(0.5)),
      button("−", "Zoom out", () => this.zoom(2)),
      button("All", "Show the whole step", () => this.zoom(Infinity)),
    );
    return bar;
  }

  timesSelect() {
    const select = make("select", { id: "timeline-times", "aria-label": "Times" },
      make("option", {}, "simulated"), make("option", {}, "measured"));
    select.addEventListener("change", () => {
      this.take(select.value === "measured" ? measuredReport(this.simulated) : this.simulated);
      this.draw();
    });
    return select;
  }

  zoom(factor, about) {
    if (factor === Infinity) this.view.fit();
    else this.view.zoom(factor, about);
    this.draw();
  }

  draw() {
    this.place = drawTimeline(
      this.canvas, this.report, this.rows, this.view, this.chosen, this.hidden,
    );
    const { from, to, end } = this.view;
    this.state.textContent =
      `Shows ${secondsText(from)} to ${secondsText(to)} of ${secondsText(end)}.`;
  }

  // What lies where.

  secondsAt(x) {
    return this.view.from + (x - this.place.left) / this.place.scale;
  }

  /** Return the op or message under a point of the canvas; null if there is none. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top;
    const row = this.rows.find((each) => y >= each.top && y < each.top + each.height);
    if (!row || event.clientX - box.left < this.place.left) return null;
    const columns = row.link ? this.report.messages : this.report.bars;
    const seconds = this.secondsAt(event.clientX - box.left);
    const item = itemAt(row, columns, seconds, 3 / this.place.scale);
    if (item < 0) return null;
    return row.link ? { message: item } : { op: item };
  }

  listen() {
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("wheel", (event) => this.turn(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerup", (event) => this.release(event));
    this.canvas.addEventListener("pointercancel", () => { this.held = null; });
  }

  turn(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    this.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.secondsAt(event.clientX - box.left));
  }

  grab(event) {
    this.held = { x: event.clientX, from: this.view.from, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  point(event) {
    if (!this.held) {
      const found = this.at(event);
      this.hover.textContent = found ? this.sentence(found) : "\u00a0";
      return;
    }
    const away = event.clientX - this.held.x;
    this.held.moved ||= Math.abs(away) > 3;
    if (!this.held.moved) return;
    this.view.move(this.held.from - away / this.place.scale, this.view.to - this.view.from);
    this.draw();
  }

  release(event) {
    const wasMoved = this.held?.moved;
    this.held = null;
    const found = wasMoved ? null : this.at(event);
    if (found?.op !== undefined) location.hash = `op=${encodeURIComponent(this.report.bars.name[found.op])}`;
    else if (found) this.showMessage(found.message);
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const length = this.view.to - this.view.from;
    const actions = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.zoom(Infinity),
      ArrowLeft: () => this.pan(-length / 4), ArrowRight: () => this.pan(length / 4),
      ".": () => this.step(1), ",": () => this.step(-1),
      ArrowDown: () => this.change(1), ArrowUp: () => this.change(-1),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  pan(seconds) {
    this.view.pan(seconds);
    this.draw();
  }

  // The chosen op.

  /** Go to the next op of the device, or back. */
  step(direction) {
    const row = this.rows[this.chosen ? this.report.bars.device[this.chosen.op] : 0];
    const at = this.chosen ? row.items.indexOf(this.chosen.op) + direction : 0;
    if (row.items[at] !== undefined) this.go(row.items[at]);
  }

  /** Go to what another device does at the same time. */
  change(direction) {
    const { bars, devices } = this.report;
    const device = this.chosen ? bars.device[this.chosen.op] + direction : 0;
    const row = this.rows[device];
    if (device < 0 || device >= devices.length || !row || row.link) return;
    const now = this.chosen ? bars.start_s[this.chosen.op] : this.view.from;
    const after = firstNotBelow(row.items.length, (i) => bars.start_s[row.items[i]], now);
    const item = row.items[Math.min(after, row.items.length - 1)];
    if (item !== undefined) this.go(item);
  }

  go(op) {
    location.hash = `op=${encodeURIComponent(this.report.bars.name[op])}`;
  }

  /** Show an op: zoom to it and tell about it. */
  choose(op) {
    const { bars } = this.report;
    this.chosen = { op };
    if (bars.seconds[op] * this.place.scale < 8 || bars.start_s[op] < this.view.from ||
        bars.start_s[op] > this.view.to) this.view.show(bars.start_s[op], bars.seconds[op]);
    this.draw();
    this.detail.hidden = false;
    this.detail.replaceChildren(facts(opFacts(this.report, op)));
  }

  showMessage(message) {
    this.detail.hidden = false;
    this.detail.replaceChildren(facts(messageFacts(this.report, message)));
  }

  sentence(found) {
    const pairs = found.op === undefined
      ? messageFacts(this.report, found.message)
      : opFacts(this.report, found.op).slice(0, 5);
    return pairs.filter(([, value]) => value).map(([, value]) => value).join(" · ");
  }
}

/** Return the report with the times of its run, which tells no messages and no critical path. */
function measuredReport(report) {
  const { start_s, seconds, ranks } = report.measured;
  const none = report.bars.critical.map(() => 0);
  const step = Math.max(...ranks.map((rank) => rank.step_s));
  return {
    ...report,
    bars: { ...report.bars, start_s, seconds, critical: none },
    links: [],
    messages: Object.fromEntries(Object.keys(report.messages).map((name) => [name, []])),
    times: { ...report.times, makespan_s: step },
  };
}

function opFacts(report, op) {
  const { bars } = report;
  const phase = report.phases[bars.phase[op]];
  const piece = bars.piece[op] < 0 ? "" : `, piece ${bars.piece[op]}`;
  const begin = bars.start_s[op];
  return [
    ["op", bars.name[op]],
    ["ops in this bar", bars.count[op] > 1 ? `${bars.count[op]}, named for the longest` : ""],
    ["device", report.devices[bars.device[op]].name],
    ["phase", phase + piece],
    ["time", `${secondsText(bars.seconds[op])}, from ${secondsText(begin)} on`],
    ["measured", report.measured ? secondsText(report.measured.seconds[op]) : ""],
    ["call", bars.kinds[bars.kind[op]]],
    ["module", bars.modules[bars.module[op]]],
    ["your line", bars.sources[bars.source[op]]],
    ["starts when", reasonText(report, op)],
    ["critical path", bars.critical[op] ? "yes: longer here, longer step" : "no"],
  ];
}

function reasonText(report, op) {
  const reason = report.bars.waits_for[op];
  if (reason === null || (reason < 0 && !(-1 - reason in report.messages.tensor))) return "";
  if (reason >= 0) {
    const device = report.devices[report.bars.device[reason]].name;
    return `op ${report.bars.name[reason]} of ${device} ends`;
  }
  const message = -1 - reason;
  const { tensor, source } = report.messages;
  return `tensor ${tensor[message]} of ${report.devices[source[message]].name} arrives`;
}

function messageFacts(report, message) {
  const { tensor, source, target, bytes, start_s: starts, seconds, count, critical } = report.messages;
  return [
    ["message", tensor[message]],
    ["messages in this bar", count[message] > 1 ? String(count[message]) : ""],
    ["link", `${report.devices[source[message]].name} to ${report.devices[target[message]].name}`],
    ["size", bytesText(bytes[message])],
    ["time", `${secondsText(seconds[message])}, from ${secondsText(starts[message])} on`],
    ["critical path", critical[message] ? "yes" : "no"],
  ];
}
