// From the data in the page to the page.

const report = JSON.parse(document.getElementById("report").textContent);
const timeline = new Timeline(report, document.getElementById("timeline-view"));
buildMemory(report, document.getElementById("memory-view"));
const modules = new ModuleTree(report, document.getElementById("modules-view"));
buildFind(report, document.getElementById("find"));

/** Go where the address points: #op=NAME, #module=PATH, #message=NUMBER, or a section. */
function follow() {
  const [what, ...rest] = location.hash.slice(1).split("=");
  const name = decoded(rest.join("="));
  if (what === "op") {
    const op = report.bars.name.indexOf(name);
    if (op >= 0) timeline.choose(op);
    document.getElementById("timeline").scrollIntoView();
  } else if (what === "module") {
    modules.choose(name);
  } else if (what === "message" && name in report.messages.tensor) {
    timeline.showMessage(Number(name));
    document.getElementById("timeline").scrollIntoView();
  }
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function redrawAll() {
  for (const redraw of redraws) redraw();
}

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  redrawAll();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
window.addEventListener("beforeprint", () => {
  document.documentElement.dataset.print = "1";
  redrawAll();
});
window.addEventListener("afterprint", () => {
  delete document.documentElement.dataset.print;
  redrawAll();
});
window.addEventListener("hashchange", follow);
follow();
document.documentElement.dataset.ready = "1";
