// The AI SDK: text, streams, objects, tools, embeddings and images, by its package for servers with OpenAI's API.
import assert from 'node:assert/strict';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import * as ai from 'ai';
import { z } from 'zod';

const url = process.argv[2];
const provider = createOpenAICompatible({ name: 'dovetail', baseURL: `${url}/v1`, apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true });
const model = provider.chatModel('demo');
const picture = 'iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAFklEQVR42mO4YKBAEmIY1TCqYfhqAADM5yAQMiJu6gAAAABJRU5ErkJggg==';
const place = z.object({ city: z.enum(['Verona', 'Mantua']) }).strict();
const common = { model, prompt: 'Speak!', temperature: 0, maxRetries: 0, maxOutputTokens: 8 };

async function plain(path, body) {
  const answer = await fetch(url + path, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ model: 'demo', ...body }) });
  return answer.json();
}

async function spoken() {
  const answer = await plain('/v1/chat/completions', { messages: [{ role: 'user', content: 'Speak!' }], max_tokens: 8, temperature: 0 });
  return answer.choices[0].message.content;
}

const checks = {
  async chat() {
    assert.equal((await ai.generateText(common)).text, await spoken());
  },
  async stream() {
    const answer = ai.streamText(common);
    let text = '';
    for await (const piece of answer.textStream) text += piece;
    assert.equal(text, await spoken());
    assert.equal((await answer.usage).outputTokens, 8);
  },
  async schema() {
    const answer = await ai.generateText({ ...common, maxOutputTokens: 100, output: ai.Output.object({ schema: place }) });
    assert.ok(['Verona', 'Mantua'].includes(answer.output.city));
  },
  async tools() {
    const weather = ai.tool({ description: 'Return the weather of a city.', inputSchema: place, execute: async ({ city }) => `Rain in ${city}.` });
    const answer = await ai.generateText({ ...common, maxOutputTokens: 100, tools: { weather }, toolChoice: { type: 'tool', toolName: 'weather' } });
    assert.match(answer.toolResults[0].output, /^Rain in/);
  },
  async images() {
    const base = process.env.DOVETAIL_TEST_IMAGES_URL;
    const seeing = createOpenAICompatible({ name: 'dovetail', baseURL: `${base}/v1`, apiKey: 'none' });
    const content = [{ type: 'image_url', image_url: { url: `data:image/png;base64,${picture}` } }, { type: 'text', text: 'What is it?' }];
    const asked = { model: 'demo', messages: [{ role: 'user', content }], max_tokens: 4, temperature: 0 };
    const sent = await fetch(`${base}/v1/chat/completions`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(asked) });
    const parts = [{ type: 'image', image: Buffer.from(picture, 'base64') }, { type: 'text', text: 'What is it?' }];
    const answer = await ai.generateText({ model: seeing.chatModel('demo'), messages: [{ role: 'user', content: parts }], temperature: 0, maxRetries: 0, maxOutputTokens: 4 });
    assert.equal(answer.text, (await sent.json()).choices[0].message.content);
  },
  async embeddings() {
    const texts = ['ROMEO:', 'JULIET: my love'];
    const made = await ai.embedMany({ model: provider.embeddingModel('demo'), values: texts, maxRetries: 0 });
    const expected = (await plain('/v1/embeddings', { input: texts })).data.map((one) => one.embedding);
    made.embeddings.forEach((vector, row) => vector.forEach((value, column) => assert.ok(Math.abs(value - expected[row][column]) < 1e-6)));
  },
};

const results = {};
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    results[name] = null;
  } catch (error) {
    console.error(error);
    results[name] = String(error);
  }
}
console.log(JSON.stringify(results));
