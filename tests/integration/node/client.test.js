// OpenAI's SDK for Node against a running server, whose address is in BASE_URL.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = "concierge";
const asked = { model, messages: [{ role: "user", content: "I would like a table for two in San José. 🎉" }], temperature: 0 };
const endless = { ...asked, min_tokens: 1500, max_tokens: 1500 };

// What a prompt's beginning has in the cache depends on who asked before.
const counts = ({ prompt_tokens, completion_tokens, total_tokens }) => [prompt_tokens, completion_tokens, total_tokens];

async function untilIdle() {
  const metrics = process.env.BASE_URL.replace(/v1$/, "metrics");
  for (;;) {
    const text = await (await fetch(metrics)).text();
    const busy = [...text.matchAll(/^moaserve_num_requests_(?:running|waiting)\{.*\} (.*)$/gm)];
    assert.equal(busy.length, 2);
    if (busy.every(([, count]) => Number(count) === 0)) return;
  }
}

test("models", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.deepEqual(names, [model]);
  assert.equal((await client.models.retrieve(model)).owned_by, "moaserve");
});

test("a chat, streamed and not, is the same", async () => {
  const body = { ...asked, max_tokens: 40 };
  const { data: whole, response } = await client.chat.completions.create(body).withResponse();
  assert.equal(whole._request_id, response.headers.get("x-request-id"));
  assert.ok(whole._request_id);
  const stream = await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } });
  let text = "", reason, usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    reason = chunk.choices[0]?.finish_reason ?? reason;
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(reason, whole.choices[0].finish_reason);
  assert.deepEqual(counts(usage), counts(whole.usage));
  assert.ok(whole.usage.completion_tokens <= 40);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
});

test("the SDK's own reassembly of a stream", async () => {
  const body = { ...asked, max_tokens: 30, n: 2, temperature: 1, seed: 5, logprobs: true };
  const whole = await client.chat.completions.create(body);
  const runner = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
  const joined = await runner.finalChatCompletion();
  const tokens = ({ logprobs }) => logprobs.content.map(({ token, bytes }) => [token, bytes]);
  const known = ({ choices }) => choices.map((choice) => [choice.message.content, choice.finish_reason, tokens(choice)]);
  assert.deepEqual(known(joined), known(whole));
  // Their last bits depend on how many rows a pass has.
  const scores = ({ choices }) => choices.flatMap(({ logprobs }) => logprobs.content.map(({ logprob }) => logprob));
  scores(joined).forEach((each, index) => assert.ok(Math.abs(each - scores(whole)[index]) < 1e-3));
  assert.deepEqual(counts(joined.usage), counts(whole.usage));
});

test("log-probabilities", async () => {
  const answer = await client.chat.completions.create({ ...asked, max_tokens: 12, logprobs: true, top_logprobs: 3 });
  const { content } = answer.choices[0].logprobs;
  assert.equal(content.length, answer.usage.completion_tokens);
  for (const each of content) {
    assert.equal(each.top_logprobs.length, 3);
    assert.equal(each.top_logprobs[0].logprob, each.logprob); // greedy
  }
  const bytes = Buffer.from(content.flatMap((each) => each.bytes)).toString();
  assert.ok(bytes.startsWith(answer.choices[0].message.content));
});

test("text completions", async () => {
  const body = { model, prompt: ["def add(a, b):", "Hello"], max_tokens: 12, temperature: 0, logprobs: 1 };
  const whole = await client.completions.create(body);
  const texts = ["", ""];
  for await (const chunk of await client.completions.create({ ...body, stream: true })) {
    for (const choice of chunk.choices) texts[choice.index] += choice.text;
  }
  assert.deepEqual(texts, whole.choices.map((choice) => choice.text));
  assert.equal(whole.choices[0].logprobs.tokens.length, whole.choices[0].logprobs.token_logprobs.length);
});

test("errors have classes of their own", async () => {
  const refused = (body, kind, status, code, param) =>
    assert.rejects(client.chat.completions.create(body), (error) => {
      assert.ok(error instanceof kind, `${error.constructor.name}: ${error.message}`);
      assert.deepEqual([error.status, error.code, error.param, error.type], [status, code, param, "invalid_request_error"]);
      assert.ok(error.requestID);
      return true;
    });
  await refused({ ...asked, temperature: 7 }, OpenAI.BadRequestError, 400, "invalid_value", "temperature");
  await refused({ ...asked, tempreture: 1 }, OpenAI.BadRequestError, 400, "unknown_parameter", "tempreture");
  await refused({ ...asked, temperature: 7, stream: true }, OpenAI.BadRequestError, 400, "invalid_value", "temperature");
  await refused({ ...asked, model: "gpt-99" }, OpenAI.NotFoundError, 404, "model_not_found", "model");
  await refused({ ...asked, max_tokens: 99999 }, OpenAI.BadRequestError, 400, "context_length_exceeded", "max_tokens");
  await assert.rejects(client.files.list(), OpenAI.NotFoundError);
  await assert.rejects(client.delete("/models"), (error) => error instanceof OpenAI.APIError && error.status === 405);
  const slow = client.chat.completions.create(endless, { timeout: 50 });
  await assert.rejects(slow, OpenAI.APIConnectionTimeoutError);
  await untilIdle();
});

test("an aborted stream ends quietly and frees its slot", async () => {
  const stream = await client.chat.completions.create({ ...endless, stream: true });
  let chunks = 0;
  for await (const _ of stream) {
    if (++chunks === 3) stream.controller.abort();
  }
  // The SDK still hands over what arrived together with the third.
  assert.ok(chunks >= 3 && chunks < 1500, `${chunks} chunks`);
  await untilIdle();
});

test("an aborted request is rejected and frees its slot", async () => {
  for (const stream of [false, true]) {
    const aborting = new AbortController();
    setTimeout(() => aborting.abort(), 100);
    const reading = async () => {
      const answer = await client.chat.completions.create({ ...endless, stream }, { signal: aborting.signal });
      if (stream) for await (const _ of answer);
    };
    if (stream) await reading().catch((error) => assert.ok(error instanceof OpenAI.APIUserAbortError));
    else await assert.rejects(reading(), OpenAI.APIUserAbortError);
    await untilIdle();
  }
});
