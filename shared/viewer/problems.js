// Groups are named by their problems: people recognise a prompt and a gold answer, not an id.

import { ApiError, get, path } from "./api.js";
import { el, fill } from "./dom.js";
import { link } from "./place.js";

/** Concurrent requests of a list. */
export const AT_ONCE = 6;
const MOST_REMEMBERED = 1000;

const problems = new Map();

/** The response of GET /v1/batches/{id}/rewards; null if the server has no completions of this group to show. */
export async function readGroup(id, signal) {
  /** @type {Api["RewardsView"] | null} */
  let group = null;
  try {
    group = await get(path("v1", "batches", id, "rewards"), {}, signal);
  } catch (error) {
    if (!(error instanceof ApiError) || ![404, 422].includes(error.status)) throw error;
  }
  problems.set(id, { prompt: group?.prompt ?? null, answer: group?.answer ?? null });
  if (problems.size > MOST_REMEMBERED) problems.delete(problems.keys().next().value);
  return group;
}

/** The problem of a group, { prompt, answer }, each null if unknown. */
export async function readProblem(id, signal) {
  if (!problems.has(id)) await readGroup(id, signal);
  return problems.get(id);
}

/** A link to a group. It shows the prompt, or the end of the id where that is unknown. */
export function groupLink(id, open, about = id) {
  const element = el("a", { href: link(["batch", id]), click: open, title: about });
  return named(element, id);
}

function named(element, id) {
  const prompt = problems.get(id)?.prompt ?? null;
  element.classList.toggle("id", prompt === null);
  return fill(element, prompt ?? shortId(id));
}

// Ids begin with the time, which is nearly the same for many batches.
const shortId = (id) => (id.length > 12 ? `…${id.slice(-12)}` : id);

/** A function (link, id) that reads the prompt of a group for its link, unless the link has left the page by then. */
export function promptReader(signal) {
  const waiting = [];
  let readers = 0;
  const read = async () => {
    if (readers === AT_ONCE) return;
    readers++;
    while (waiting.length && !signal.aborted) {
      const [element, id] = waiting.pop(); // the latest: earlier ones may have been scrolled past
      // An error leaves the id; the header shows when the server is unreachable.
      if (element.isConnected) await readProblem(id, signal).then(() => named(element, id), () => {});
    }
    readers--;
  };
  return (element, id) => {
    if (problems.has(id)) return;
    waiting.push([element, id]);
    queueMicrotask(read); // once the link is on the page
  };
}
