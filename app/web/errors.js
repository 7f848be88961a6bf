// What went wrong, in words that say what to do.

/** `advice` says what to do, `detail` what the server said; `about` is "key" where the API key is to blame. */
export class Failure extends Error {
  constructor(advice, { detail = "", about = "", retryAfter = 0 } = {}) {
    super(advice);
    Object.assign(this, { advice: advice, detail, about, retryAfter });
  }
}

/** The failure that an answer other than 200 stands for. */
export async function refused(response) {
  const error = await response.json().then((body) => body?.error, () => undefined);
  const retryAfter = Number(response.headers.get("Retry-After")) || 5;
  const id = response.headers.get("X-Request-ID");
  return explained(response.status, error, retryAfter, id);
}

/** The failure that a stream's error event stands for. */
export function broken(error) {
  return explained({ service_unavailable: 503, request_timeout: 408, rate_limit_exceeded: 429 }[error.code] ?? 500, error, 5, null);
}

/** The failure that an exception of `fetch` or of reading its answer stands for. */
export function disconnected(error) {
  return new Failure("The server cannot be reached. See that it is running and that you are online, then try again.", { detail: error.message });
}

/** The failure that an answer stands for which is none of this API's, such as a proxy's page. */
export function foreign(detail) {
  return new Failure("What answers here is not this server’s API. See what stands between it and this page, then try again.", { detail });
}

/** The failure that a key stands for which no request can carry, as one that was pasted with an unseen character. */
export function unsendable() {
  return new Failure("This API key holds a character that cannot be sent, perhaps an unseen one. Type it anew in the settings.", { about: "key" });
}

function explained(status, error, retryAfter, id) {
  const detail = error?.message ?? "";
  const code = error?.code;
  if (status === 401) {
    const given = detail.startsWith("Incorrect");
    const advice = given ? "The server does not accept this API key. Correct it in the settings." : "This server wants an API key. Enter it in the settings.";
    return new Failure(advice, { detail, about: "key" });
  }
  if (status === 429) return new Failure(`Too many requests for now. Try again in ${retryAfter} s.`, { detail, retryAfter });
  if (status === 503) return new Failure(`The server cannot answer for now. Try again in ${retryAfter} s.`, { detail, retryAfter });
  if (code === "context_length_exceeded") return new Failure("This is more than the model can read. Start a new chat, or ask for fewer tokens.", { detail });
  if (status === 404 && code === "model_not_found") return new Failure("This model is no longer served. Choose another, then try again.", { detail });
  if (status === 408) return new Failure("This took longer than the server allows. Ask for fewer tokens.", { detail });
  if (status === 403) return new Failure("The server does not answer under this address. Use one of its --allowed-hosts.", { detail });
  if (status < 500) return new Failure("The server refuses this request. Change what it names, then try again.", { detail: detail || `HTTP ${status}` });
  return new Failure("The server failed. Its log says why; then try again.", { detail: [detail || `HTTP ${status}`, id && `Request ${id}`].filter(Boolean).join(" ") });
}
