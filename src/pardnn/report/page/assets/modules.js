// The tree of the model's modules.

const ROWS_AT_FIRST = 40;
const MOST_SORTED = 100;
const ORDERS = { "as in the model": null, "by time": timeOf, "by weights": (row) => row.state_bytes,
  "by activations": (row) => row.made_bytes };

function timeOf(row) {
  return row.phase_s.reduce((sum, seconds) => sum + seconds, 0);
}

class ModuleTree {
  constructor(report, place) {
    this.report = report;
    this.rows = report.modules;
    const depth = firstDepth(this.rows);
    this.open = new Set(this.rows.filter((row) => row.depth < depth).map((row) => row.path));
    this.hasChild = new Set(this.rows.map((row) => parentOf(row.path)));
    this.order = null;
    this.body = make("tbody");
    this.state = make("p", { class: "quiet", "aria-live": "polite" });
    const head = ["module", "time", "of the work", "weights, states", "activations", "by phase", "devices", "layout"];
    const top = make("tr", {}, ...head.map((each) => make("th", { scope: "col" }, each)));
    const table = make("table", { class: "tree" }, make("thead", {}, top), this.body);
    place.append(this.controls(), make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Modules" }, table), this.state);
    this.show();
  }

  controls() {
    const select = make("select", { id: "module-order" });
    for (const name of Object.keys(ORDERS)) select.append(make("option", {}, name));
    select.addEventListener("change", () => {
      this.order = ORDERS[select.value];
      this.show();
    });
    const all = new Set(this.rows.map((row) => row.path));
    return make("div", { class: "bar" }, make("label", { for: "module-order" }, "Sort"), select,
      button("Open all", "Open all modules", () => { this.open = all; this.show(); }),
      button("Close all", "Close all modules", () => { this.open = new Set([""]); this.show(); }));
  }

  /** Return the rows to show: those below open ones, or all leaves by size. */
  shown() {
    if (this.order) {
      return this.rows
        .filter((row) => row.path && !this.hasChild.has(row.path))
        .sort((a, b) => this.order(b) - this.order(a))
        .slice(0, MOST_SORTED);
    }
    return this.rows.filter((row) => pathsAbove(row.path).every((path) => this.open.has(path)));
  }

  show() {
    const rows = this.shown();
    this.body.replaceChildren(...rows.map((row) => this.row(row)));
    const how = this.order ? ", without what has modules of its own" : "";
    this.state.textContent = `${rows.length} of ${this.rows.length} modules${how}.`;
  }

  row(row) {
    const { times, devices } = this.report;
    const work = devices.reduce((sum, device) => sum + device.busy_s, 0) || times.makespan_s || 1;
    const cells = [
      secondsText(timeOf(row)), percentText(timeOf(row) / work),
      bytesText(row.state_bytes), bytesText(row.made_bytes),
      this.parts(row.phase_s, timeOf(row)), this.devices(row), row.layout || "whole",
    ];
    const made = make("tr", { "data-module": row.path }, this.head(row),
      ...cells.map((cell) => make("td", {}, cell)));
    if (row.path === this.chosen) made.classList.add("chosen");
    return made;
  }

  head(row) {
    const cell = make("th", { scope: "row" });
    const name = row.path || "the step";
    const depth = this.order ? 0 : row.depth;
    cell.style.paddingLeft = `${depth * 1.1}rem`;
    if (!this.order && this.hasChild.has(row.path)) {
      const isOpen = this.open.has(row.path);
      const fold = button(isOpen ? "▾" : "▸", `${isOpen ? "Close" : "Open"} ${name}`, () => {
        if (!this.open.delete(row.path)) this.open.add(row.path);
        this.show();
        this.body.querySelector(`tr[data-module="${CSS.escape(row.path)}"] button`)?.focus();
      });
      fold.className = "fold";
      fold.setAttribute("aria-expanded", String(isOpen));
      cell.append(fold);
    }
    cell.append(depth > 1 ? name.slice(parentOf(name).length + 1) : name);
    return cell;
  }

  /** Return a strip of what phases take. */
  parts(seconds, total) {
    const strip = make("div", { class: "parts", role: "img" });
    const words = [];
    seconds.forEach((each, phase) => {
      if (each <= 0) return;
      const part = make("span");
      part.style.width = `${(100 * each) / total}%`;
      part.style.background = `var(--${PHASE_COLOURS[phase]})`;
      words.push(`${this.report.phases[phase]} ${percentText(each / total)}`);
      strip.append(part);
    });
    strip.setAttribute("aria-label", words.join(", ") || "nothing");
    strip.title = words.join(", ");
    return strip;
  }

  devices(row) {
    const used = Object.entries(row.device_s).sort((a, b) => b[1] - a[1]);
    const total = timeOf(row) || 1;
    const words = used.slice(0, 4).map(([device, seconds]) =>
      used.length === 1 ? this.report.devices[device].name
        : `${this.report.devices[device].name} ${Math.round((100 * seconds) / total)} %`);
    return words.join(", ") + (used.length > 4 ? ` and ${used.length - 4} more` : "") || "–";
  }

  /** Open what is above a module, and mark it. */
  choose(path) {
    this.chosen = path;
    this.order = null;
    for (const above of pathsAbove(path)) this.open.add(above);
    this.show();
    this.body.querySelector("tr.chosen")?.scrollIntoView({ block: "center" });
  }
}

/** Return the depth down to which the tree is open at first. */
function firstDepth(rows) {
  let depth = 1;
  while (depth < 20 && rows.filter((row) => row.depth <= depth + 1).length <= ROWS_AT_FIRST) depth += 1;
  return depth;
}

function parentOf(path) {
  const dot = path.lastIndexOf(".");
  return dot < 0 ? (path ? "" : null) : path.slice(0, dot);
}

function pathsAbove(path) {
  const above = [];
  for (let at = parentOf(path); at !== null; at = parentOf(at)) above.push(at);
  return above;
}
