// Requests to the server's API. In a report, the page's embedded data answers them instead.

import { search } from "./place.js";
import { recorded, recordedAnswer } from "./recorded.js";
import { askForToken, headersOf, token } from "./token.js";

/** An error response. status: 0 if the server cannot be reached. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** GET: get("v1/batches", { state: "dead", limit: 100 }) -> the parsed JSON. Throws ApiError, or an abort. */
export async function get(path, query = {}, signal = undefined) {
  if (!recorded) return (await ask(path, query, { signal })).json();
  const answer = recordedAnswer(path, query);
  if (answer === undefined) throw new ApiError(404, "This report does not contain it.");
  return answer;
}

/** GET: the body of the response as a Blob, such as a picture. A report has none. */
export async function getBlob(path, signal) {
  return (await ask(path, {}, { signal })).blob();
}

export async function post(path) {
  return (await ask(path, {}, { method: "POST" })).json();
}

/** A response whose body is read as it arrives. */
export function stream(path, signal) {
  return ask(path, {}, { signal, cache: "no-store" });
}

/** The segments of a path, escaped: path("v1", "batches", id). */
export const path = (...segments) => segments.map(encodeURIComponent).join("/");

async function ask(path, query, options) {
  const sent = token();
  const answer = await send(path, query, { ...options, headers: headersOf(sent) });
  if (answer.ok) return answer;
  const message = await messageOf(answer);
  if (answer.status !== 401) throw new ApiError(answer.status, message);
  const why = sent ? "The server no longer accepts this tab's token." : "The link that policy-trainer train or dashboard prints contains it, and so does RUN_DIR/server.json. For any other server, use a token from its --token-file.";
  if (token() !== sent || (await askForToken(why))) return ask(path, query, options);
  throw new ApiError(401, "An access token is required.");
}

async function send(path, query, options) {
  try {
    return await fetch(path + search(query), { ...options, credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
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
