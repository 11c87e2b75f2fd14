// The binary frame of /live/frame: u32 length of the JSON header, the header, then the arrays it lists.

const KINDS = { uint8: Uint8Array, uint32: Uint32Array, int32: Int32Array, float32: Float32Array };

/** Read one frame: its header's fields, and every array under its name; "lossy.delta" is one of frame.lossy. `labelled`: those to name in words. */
export function decode(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const { arrays, ...frame } = head;
  frame.labelled = arrays.filter(({ label }) => label);
  for (const { name, dtype, shape, offset } of arrays) {
    const size = shape.reduce((a, b) => a * b, 1);
    const [last, ...path] = name.split(".").reverse(), owner = path.reverse().reduce((part, key) => part[key], frame);
    owner[last] = new KINDS[dtype](buffer, 4 + length + offset, size);
  }
  return frame;
}

/** Ask for a newer frame than `since`. Null when nothing changed; a frame without `model` when none is loaded. */
export async function fetchFrame(layer, since) {
  const answer = await fetch(`/live/frame?layer=${layer}&since=${encodeURIComponent(since)}`, { cache: "no-store" });
  if (answer.status === 204) return null;
  if (answer.status === 400 && layer) return fetchFrame(0, since); // another model, with fewer layers
  if (!answer.ok) throw new Error(`frame: ${answer.status}`);
  return decode(await answer.arrayBuffer());
}
