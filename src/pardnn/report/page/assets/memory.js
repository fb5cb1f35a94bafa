// Memory along each device's order, stacked by kind.

const CHART = 130;
const MOST_CHARTS = 16;

function buildMemory(report, place) {
  const legend = make("div", { class: "bar" });
  for (const kind of report.kinds) legend.append(key(kind, kind));
  const fullest = report.devices
    .map((device, i) => ({ i, share: device.peak_bytes / (device.limit_bytes || Infinity) }))
    .sort((a, b) => b.share - a.share || a.i - b.i)
    .slice(0, MOST_CHARTS)
    .map(({ i }) => i)
    .sort((a, b) => a - b);
  const grid = make("div", { class: "charts" });
  place.append(legend, grid);
  if (fullest.length < report.devices.length) {
    place.append(make("p", { class: "quiet" }, `The ${MOST_CHARTS} fullest devices are drawn.`));
  }
  for (const device of fullest) {
    if (report.memory[device].position.length) new MemoryView(report, device, grid);
  }
}

class MemoryView {
  constructor(report, device, grid) {
    this.report = report;
    this.device = report.devices[device];
    this.chart = report.memory[device];
    this.at = this.chart.peak_at;
    this.canvas = make("canvas", {
      role: "img", tabindex: "0",
      "aria-label": `Memory of ${this.device.name} along its order; the table says what the peak holds.`,
    });
    this.state = make("p", { class: "quiet", "aria-live": "polite" });
    const part = make("div", { class: "memory", id: `memory-${device}` });
    grid.append(part);
    part.append(make("h3", {}, this.device.name), this.canvas, this.state, this.liveTable());
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    redraws.push(() => this.draw());
    this.draw();
  }

  liveTable() {
    const { live, others_bytes: others } = this.chart;
    const head = ["at the peak", "size", "kind", "made by", "freed after"];
    const body = make("tbody");
    for (const held of live) {
      const cells = [bytesText(held.bytes), held.kind, held.made_by, held.freed_after ?? "it stays"];
      body.append(make("tr", {}, make("th", { scope: "row" }, held.tensor),
        ...cells.map((cell) => make("td", {}, cell))));
    }
    if (others > 0) {
      body.append(make("tr", {}, make("th", { scope: "row" }, "all others"), make("td", {}, bytesText(others))));
    }
    const top = make("tr", {}, ...head.map((each) => make("th", { scope: "col" }, each)));
    const table = make("table", {}, make("thead", {}, top), body);
    return make("details", {}, make("summary", {}, "What the peak holds"),
      make("div", { class: "scroll" }, table));
  }

  get total() {
    this.sums ??= this.chart.position.map((_, i) =>
      this.chart.held.reduce((sum, kind) => sum + kind[i], 0));
    return this.sums;
  }

  draw() {
    const { context, width } = contextOf(this.canvas, CHART);
    const { position } = this.chart;
    const end = Math.max(position[position.length - 1] + 1, this.device.ops);
    const limit = this.device.limit_bytes;
    const most = Math.max(this.device.peak_bytes, limit ?? 0, 1) * 1.06;
    this.x = (i) => (i < position.length ? (position[i] / end) * width : width);
    const y = (bytes) => CHART - (bytes / most) * CHART;
    context.clearRect(0, 0, width, CHART);
    context.fillStyle = colourOf("soft");
    context.fillRect(0, 0, width, CHART);
    this.stack(context, y);
    if (limit !== null) this.drawLimit(context, y(limit), width);
    context.fillStyle = colourOf("text");
    context.fillRect(this.x(this.at), y(this.total[this.at]), 1.5, CHART);
    this.tell();
  }

  stack(context, y) {
    const base = this.chart.position.map(() => 0);
    this.report.kinds.forEach((kind, row) => {
      context.fillStyle = fillOf(context, kind);
      context.beginPath();
      base.forEach((bytes, i) => {
        context.lineTo(this.x(i), y(bytes));
        context.lineTo(this.x(i + 1), y(bytes));
      });
      for (let i = base.length - 1; i >= 0; i -= 1) {
        base[i] += this.chart.held[row][i];
        context.lineTo(this.x(i + 1), y(base[i]));
        context.lineTo(this.x(i), y(base[i]));
      }
      context.fill();
    });
  }

  drawLimit(context, y, width) {
    context.strokeStyle = colourOf("mark");
    context.lineWidth = 1.5;
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
    context.setLineDash([]);
  }

  tell() {
    const { chart, report, device } = this;
    const parts = report.kinds
      .map((kind, row) => [kind, chart.held[row][this.at]])
      .filter(([, bytes]) => bytes > 0)
      .map(([kind, bytes]) => `${kind} ${bytesText(bytes)}`);
    const isPeak = this.at === chart.peak_at ? "the peak" : "here";
    const limit = device.limit_bytes === null ? "" : `, limit ${bytesText(device.limit_bytes)} (dashed)`;
    this.state.textContent =
      `Op ${chart.position[this.at] + 1} of ${device.ops}, ${chart.op[this.at]}: ` +
      `${bytesText(this.total[this.at])}, ${isPeak}${limit}: ${parts.join(", ")}.`;
  }

  move(at) {
    this.at = Math.max(0, Math.min(at, this.chart.position.length - 1));
    this.draw();
  }

  point(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    this.move(firstNotBelow(this.chart.position.length, this.x, x + 0.001) - 1);
  }

  press(event) {
    const moves = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, 0: this.chart.peak_at };
    if (moves[event.key] === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.move(moves[event.key]);
  }
}
