// Numbers as people read them; the same rules as the command line's.

const BYTE_UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const TIME_UNITS = [["s", 1], ["ms", 1e-3], ["us", 1e-6]];

function bytesText(bytes) {
  if (bytes === null) return "unlimited";
  for (const [unit, scale] of BYTE_UNITS) {
    if (bytes >= scale) return `${(bytes / scale).toFixed(2)} ${unit}`;
  }
  return `${bytes} B`;
}

function secondsText(seconds) {
  if (seconds === 0) return "0 s";
  for (const [unit, scale] of TIME_UNITS) {
    if (Math.abs(seconds) >= scale) return `${Number((seconds / scale).toPrecision(4))} ${unit}`;
  }
  return `${Number((seconds / 1e-9).toPrecision(4))} ns`;
}

function percentText(fraction) {
  return `${(100 * fraction).toFixed(1)} %`;
}

/** Return about `count` round numbers between two seconds. */
function ticks(from, to, count) {
  const rough = (to - from) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to; i += 1) found.push(i * step);
  return found;
}
