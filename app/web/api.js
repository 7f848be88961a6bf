// The server's API, found beside the page: whatever path a proxy serves both under.

import { broken, disconnected, foreign, refused, unsendable } from "./errors.js";
import { eventData } from "./sse.js";

/** The names of the served models; throws a Failure. */
export async function models(key) {
  const response = await ask("v1/models", { headers: headers(key) });
  return (await response.json()).data.map((model) => model.id);
}

/** The chunks of a streamed chat completion; throws a Failure, or an AbortError once `signal` says stop. */
export async function* chat(body, key, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { continuous_metrics: true }, return_token_origins: true }),
    signal,
  });
  let done = false;
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") {
        done = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw broken(chunk.error);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof SyntaxError) throw foreign(error.message);
    throw error instanceof TypeError ? disconnected(error) : error;
  }
  if (!done) throw disconnected(new Error("The answer broke off."));
}

function headers(key) {
  if (/[^\0-\xff]/.test(key)) throw unsendable();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw disconnected(error);
  }
  if (!response.ok) throw await refused(response);
  if (response.headers.get("Content-Type")?.startsWith("text/html")) throw foreign("It sent a web page.");
  return response;
}
