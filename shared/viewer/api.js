// Requests to the server's API. In a report, the page's embedded data answers them instead.

import { search } from "./place.js";
import { recorded, recordedAnswer } from "./recorded.js";
import { askForToken, headersOf, token } from "./token.js";

/** An error response. status: 0 if the server cannot be reached. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * GET: get("v1/batches", { state: "dead", limit: 100 }) -> the parsed JSON. Throws ApiError, or an abort. The caller says
 * which of the server's records it is: with its type, a field that the server does not have is an error of `make lint-js`.
 * @param {string} address
 * @param {Record<string, any>} query
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function get(address, query = {}, signal) {
  if (!recorded) return (await ask(address, query, { signal })).json();
  const answer = recordedAnswer(address, query);
  if (answer === undefined) throw new ApiError(404, "This report does not contain it.");
  return answer;
}

/** GET: the body of the response as a Blob, such as a picture. A report has none. */
export async function getBlob(address, signal) {
  return (await ask(address, {}, { signal })).blob();
}

export async function post(address) {
  return (await ask(address, {}, { method: "POST" })).json();
}

/** A response whose body is read as it arrives. */
export function stream(address, signal) {
  return ask(address, {}, { signal, cache: "no-store" });
}

/** The segments of a path, escaped: path("v1", "batches", id). */
export const path = (...segments) => segments.map(encodeURIComponent).join("/");

/** Whether a request ended because its signal aborted: the user has left the view. */
export const isAbort = (error) => error instanceof Error && error.name === "AbortError";

async function ask(address, query, options) {
  const sent = token();
  const answer = await send(address, query, { ...options, headers: headersOf(sent) });
  if (answer.ok) return answer;
  const message = await messageOf(answer);
  if (answer.status !== 401) throw new ApiError(answer.status, message);
  const why = sent ? "The server no longer accepts this tab's token." : "The link that policy-trainer train or dashboard prints contains it, and so does RUN_DIR/server.json. For any other server, use a token from its --token-file.";
  if (token() !== sent || (await askForToken(why))) return ask(address, query, options);
  throw new ApiError(401, "An access token is required.");
}

async function send(address, query, options) {
  try {
    return await fetch(address + search(query), { ...options, credentials: "omit", redirect: "error" });
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
}

async function messageOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}
