// Drawing tools shared by the panels: sized surfaces, colours of the theme, axes, cells. Lengths are CSS pixels.

const FONT = '11px system-ui, -apple-system, "Segoe UI", sans-serif';

/** The theme's colours by name, read from the deck's CSS variables. */
export function palette(root) {
  const style = getComputedStyle(root);
  return new Proxy({}, { get: (cache, name) => (cache[name] ??= style.getPropertyValue(`--${name}`).trim()) });
}

/** Size a canvas to its box and return its cleared context with width and height. */
export function begin(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [canvas.clientWidth, canvas.clientHeight];
  const [dw, dh] = [Math.max(1, Math.round(w * ratio)), Math.max(1, Math.round(h * ratio))];
  if (canvas.width !== dw || canvas.height !== dh) Object.assign(canvas, { width: dw, height: dh });
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, w, h);
  g.font = FONT;
  return { g, w, h, ratio };
}

/** "#rrggbb" as the 32-bit pixel that ImageData wants (little endian: ABGR). */
export function pixel(hex) {
  const n = parseInt(hex.slice(1), 16);
  return ((255 << 24) | ((n & 255) << 16) | (n & 0xff00) | (n >> 16)) >>> 0;
}

/** 256 pixels running through the given colours. */
export function ramp(stops) {
  const rgb = stops.map((s) => [1, 3, 5].map((i) => parseInt(s.slice(i, i + 2), 16)));
  return Uint32Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (rgb.length - 1), k = Math.min(rgb.length - 2, Math.floor(at));
    const [r, g, b] = rgb[k].map((v, c) => Math.round(v + (rgb[k + 1][c] - v) * (at - k)));
    return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  });
}

/** Fill `box` with rows x cols cells, exact to the device pixel; cells of at least 5 px are set apart by a gap. */
export function cells({ g, ratio }, box, rows, cols, colourOf, gapColour) {
  const w = Math.round(box.w * ratio), h = Math.round(box.h * ratio);
  if (w < 1 || h < 1) return;
  const image = g.createImageData(w, h), out = new Uint32Array(image.data.buffer);
  const gap = Math.min(w / cols, h / rows) >= 5 * ratio ? Math.max(1, Math.round(ratio)) : 0;
  const columns = edges(w, cols, gap), lines = edges(h, rows, gap);
  for (let y = 0, o = 0; y < h; y++) {
    const base = lines[y] * cols;
    for (let x = 0; x < w; x++, o++) out[o] = lines[y] < 0 || columns[x] < 0 ? gapColour : colourOf(base + columns[x]);
  }
  g.putImageData(image, Math.round(box.x * ratio), Math.round(box.y * ratio));
}

/** For each pixel along a side its cell, or -1 in the gap after one. */
function edges(length, count, gap) {
  const map = new Int16Array(length);
  for (let i = 0; i < length; i++) {
    const cell = Math.min(count - 1, Math.floor((i * count) / length));
    const last = Math.ceil(((cell + 1) * length) / count) - 1;
    map[i] = gap && i > last - gap && cell < count - 1 ? -1 : cell;
  }
  return map;
}

/** A round step such that `span` is cut into at most `most` parts. */
export function niceStep(span, most) {
  const raw = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw || 1));
  return power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
}

/** Whole-number ticks for `count` cells along `length` pixels: labels stay apart. */
export function ticks(count, length, room) {
  const step = Math.max(1, Math.ceil(niceStep(count, Math.max(1, Math.floor(length / room)))));
  return Array.from({ length: Math.ceil(count / step) }, (_, i) => i * step);
}

/** Write a text with alignment in one call. */
export function label(g, text, x, y, colour, align = "left", baseline = "middle") {
  Object.assign(g, { fillStyle: colour, textAlign: align, textBaseline: baseline });
  g.fillText(text, x, y);
}

/** Say in the middle of a panel why it is empty. */
export function note({ g, w, h }, text, colour) {
  label(g, text, w / 2, h / 2, colour, "center");
}

/** A number with about three significant digits. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(size >= 0.0995 || size === 0 ? 2 : 3);
}

/** Bytes in the unit that fits `scale` (itself by default). */
export function bytes(value, scale = value) {
  const [unit, size] = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, s]) => scale >= s) ?? ["B", 1];
  return `${unit === "B" ? value : (value / size).toFixed(1)} ${unit}`;
}
