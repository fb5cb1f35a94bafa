// What part of the time the timeline shows, and what lies where on it.

const ROW = 30;
const LINK_ROW = 14;
const MOST_LINKS = 24;
const MOST_DEVICES = 64;
const AXIS = 24;

/** Return the rows of the timeline: devices, then the links that carry most. */
function timelineRows(report) {
  const rows = [];
  const devices = report.devices.map((device, i) => ({ name: device.name, items: [], device: i }));
  for (let i = 0; i < report.bars.name.length; i += 1) {
    if (report.bars.seconds[i] > 0) devices[report.bars.device[i]].items.push(i);
  }
  rows.push(...devices.slice(0, MOST_DEVICES));
  const links = new Map();
  for (const link of report.links.slice(0, MOST_LINKS)) {
    const name = `${report.devices[link.source].name} → ${report.devices[link.target].name}`;
    links.set(`${link.source},${link.target}`, { name, items: [], link });
  }
  const { source, target } = report.messages;
  for (let i = 0; i < source.length; i += 1) links.get(`${source[i]},${target[i]}`)?.items.push(i);
  rows.push(...links.values());
  let top = 0;
  for (const row of rows) {
    const columns = row.link ? report.messages : report.bars;
    row.items.sort((a, b) => columns.start_s[a] - columns.start_s[b]);
    row.longest = row.items.reduce((most, i) => Math.max(most, columns.seconds[i]), 0);
    row.top = top;
    row.height = row.link ? LINK_ROW : ROW;
    top += row.height + (row.link ? 3 : 8);
  }
  return rows;
}

/** The shown part of the step, in seconds. */
class View {
  constructor(end) {
    this.end = end > 0 ? end : 1;
    this.fit();
  }

  fit() {
    this.from = 0;
    this.to = this.end;
  }

  /** Zoom about a moment; a factor below 1 shows less time. */
  zoom(factor, about = (this.from + this.to) / 2) {
    const length = Math.min(this.end, Math.max(this.end * 1e-7, (this.to - this.from) * factor));
    const share = (about - this.from) / (this.to - this.from);
    this.move(about - share * length, length);
  }

  pan(seconds) {
    this.move(this.from + seconds, this.to - this.from);
  }

  /** Show a stretch with as much around it as it takes itself, three times. */
  show(start, seconds) {
    const length = Math.min(this.end, Math.max(seconds * 7, this.end / 200));
    this.move(start + seconds / 2 - length / 2, length);
  }

  move(from, length) {
    this.from = Math.max(0, Math.min(from, this.end - length));
    this.to = this.from + length;
  }
}

/** Return the item of a row that is shown at a moment; -1 if there is none. */
function itemAt(row, columns, seconds, slack) {
  const { items } = row;
  const after = firstNotBelow(items.length, (i) => columns.start_s[items[i]], seconds + slack);
  let best = -1;
  let distance = slack;
  for (let i = after - 1; i >= 0 && columns.start_s[items[i]] > seconds - row.longest - slack; i -= 1) {
    const start = columns.start_s[items[i]];
    const away = Math.max(start - seconds, seconds - start - columns.seconds[items[i]], 0);
    if (away === 0) return items[i];
    if (away < distance) [best, distance] = [items[i], away];
  }
  return best;
}
