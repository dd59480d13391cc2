// The pictures of a prompt.

import { ApiError, getBlob, isAbort, path } from "./api.js";
import { add, el } from "./dom.js";

/** An element that fills as pictures arrive; null without any. @param {Api["TokensView"]} tokens @param {AbortSignal} signal */
export function picturesOf({ id, images }, signal) {
  if (!images) return null;
  const list = el("ol", { class: "pictures", "aria-label": "Pictures of the prompt" });
  show(list, id, images, signal).catch((error) => {
    if (error instanceof ApiError) add(list, el("li", { class: "quiet" }, `Not all pictures can be shown: ${error.message}`));
    else if (!isAbort(error)) throw error;
  });
  return list;
}

/** One after the other: the server has the whole batch in memory for each. */
async function show(list, id, images, signal) {
  for (let i = 0; i < images; i++) {
    // An address of its own cannot be used: an img element sends no token.
    const address = URL.createObjectURL(await getBlob(path("v1", "batches", id, "images", i), signal));
    signal.addEventListener("abort", () => URL.revokeObjectURL(address));
    add(list, el("li", {}, el("img", { src: address, alt: `Picture ${i + 1} of ${images} of the prompt` })));
  }
}
