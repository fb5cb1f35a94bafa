// Colours come from the style sheet, so that dark mode and print need no second list. A pattern
// besides a colour tells phases and kinds apart without any.

const PATTERNS = {
  backward: "rising", weight: "crossed", update: "dotted",
  optimizer: "dotted", gradients: "rising", transfers: "crossed", workspace: "level",
  activations: "upright",
};
const PHASE_COLOURS = ["forward", "backward", "weight", "update", "message"];

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Return a fill: the colour of a name with its pattern. */
function fillOf(context, name) {
  const tile = document.createElement("canvas");
  tile.width = 8;
  tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = colourOf(name);
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = pen.fillStyle = "rgba(0, 0, 0, 0.28)";
  strokePattern(pen, PATTERNS[name]);
  return context.createPattern(tile, "repeat");
}

function strokePattern(pen, pattern) {
  const lines = {
    rising: [[-2, 2, 2, -2], [-2, 10, 10, -2], [6, 10, 10, 6]],
    crossed: [[0, 4, 8, 4], [4, 0, 4, 8]],
    level: [[0, 4, 8, 4]],
    upright: [[4, 0, 4, 8]],
  }[pattern] || [];
  pen.beginPath();
  for (const [x, y, toX, toY] of lines) {
    pen.moveTo(x, y);
    pen.lineTo(toX, toY);
  }
  pen.stroke();
  if (pattern === "dotted") pen.fillRect(3, 3, 2, 2);
}

/** Return the sign of a colour and its name, for a legend. */
function key(name, label) {
  const canvas = make("canvas", { width: 14, height: 14, "aria-hidden": "true" });
  const draw = () => {
    const context = canvas.getContext("2d");
    context.fillStyle = fillOf(context, name);
    context.fillRect(0, 0, 14, 14);
  };
  draw();
  redraws.push(draw);
  return make("span", { class: "key" }, canvas, label);
}

/** What is drawn again when colours or sizes change. */
const redraws = [];
