// Search over ops, modules and tensors of messages.

const MOST_FOUND = 12;

function buildFind(report, place) {
  const input = make("input", {
    type: "search", id: "find-input", placeholder: "Find an op, module or tensor ( / )",
    "aria-label": "Find an op, module or tensor", autocomplete: "off",
  });
  const state = make("p", { class: "quiet", "aria-live": "polite" });
  const list = make("ul", { id: "find-results" });
  place.append(input, state, list);
  let entries = null; // made at the first search: the page is there sooner
  const show = () => {
    entries ??= findEntries(report);
    const found = matches(entries, input.value.trim().toLowerCase());
    list.replaceChildren(...found.slice(0, MOST_FOUND).map((entry) => make("li", {}, entryButton(entry, close))));
    state.textContent = input.value.trim() ? `${found.length} found` : "";
  };
  const close = () => {
    input.value = "";
    show();
  };
  input.addEventListener("input", show);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter") list.querySelector("button")?.click();
  });
  document.addEventListener("keydown", (event) => {
    const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement?.tagName);
    if (event.key !== "/" || isTyping) return;
    event.preventDefault();
    input.focus();
  });
}

function findEntries(report) {
  const { bars, messages, modules } = report;
  const ops = bars.name.map((name, i) => ({
    text: name, kind: "op", hash: `op=${encodeURIComponent(name)}`,
    more: bars.sources[bars.source[i]],
  }));
  const paths = modules.filter((row) => row.path).map(({ path }) => ({
    text: path, kind: "module", hash: `module=${encodeURIComponent(path)}`, more: "",
  }));
  const sent = messages.tensor.map((name, i) => ({
    text: name, kind: "message", hash: `message=${i}`, more: "",
  }));
  return [...paths, ...ops, ...sent].map((entry) => ({
    ...entry, sought: `${entry.text} ${entry.more}`.toLowerCase(),
  }));
}

/** Return the entries that hold all words, those that are the text or begin with it first. */
function matches(entries, text) {
  if (!text) return [];
  const words = text.split(/\s+/);
  const found = entries.filter((entry) => words.every((word) => entry.sought.includes(word)));
  const rank = (entry) => (entry.sought.trim() === text || entry.text.toLowerCase() === text ? 0
    : entry.sought.startsWith(text) ? 1 : 2);
  return found.sort((a, b) => rank(a) - rank(b));
}

function entryButton(entry, close) {
  const label = `${entry.kind} ${entry.text}${entry.more ? ` (${entry.more})` : ""}`;
  return button(label, label, () => {
    if (location.hash === `#${entry.hash}`) window.dispatchEvent(new HashChangeEvent("hashchange"));
    location.hash = entry.hash;
    close();
  });
}
