// Elements are made here alone: what a graph or plan says is text, never markup.

/** Return a new element with attributes, and with texts or elements in it. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function button(label, title, onClick) {
  const made = make("button", { type: "button", title, "aria-label": title }, label);
  made.addEventListener("click", onClick);
  return made;
}

/** Return the canvas's context, its size in CSS pixels whatever the screen's density. */
function contextOf(canvas, height) {
  const width = canvas.clientWidth || canvas.parentElement.clientWidth;
  const density = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const context = canvas.getContext("2d");
  context.setTransform(density, 0, 0, density, 0, 0);
  context.font = '12px system-ui, "Segoe UI", sans-serif';
  return { context, width };
}

/** Return a list of terms and what they are; pairs without a value are left out. */
function facts(pairs) {
  const list = make("dl");
  for (const [term, value] of pairs) {
    if (value !== "" && value !== undefined) list.append(make("dt", {}, term), make("dd", {}, value));
  }
  return list;
}

/** Return the position before which all items of a sorted list are below a value. */
function firstNotBelow(count, valueAt, limit) {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (valueAt(middle) < limit) low = middle + 1;
    else high = middle;
  }
  return low;
}
