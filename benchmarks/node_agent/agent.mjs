// An agent in Node with OpenAI's own package, trained through the endpoint: the calculator's task
// of configs/calc.toml.  It leases sessions, asks the policy, works the calculator and scores.
//
//     cd benchmarks/node_agent && npm install --no-package-lock && cd -
//     asyncrl run configs/calc.toml --set 'agent.env=""' --set agent.serve=true
//     node benchmarks/node_agent/agent.mjs RUN
//
// It ends with the run.  A wrong key or an endpoint that has gone ends it with one line and code 1.
import { randomUUID } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import OpenAI from 'openai';
import { VERSION } from 'openai/version';

const AT_ONCE = 64; // sessions
const TURNS = 6; // as asyncrl/tasks/calc.py has them
const TIMEOUT_MS = 600_000; // a call waits for weights, swaps and restarts

class Hopeless extends Error {} // no further session could do better

/** What the calculator says to `?37*8`. */
export function calculate(text) {
  const found = /^\?(\d{1,4})([*+-])(\d{1,4})$/.exec(text);
  if (found === null) return 'e=';
  const [left, right] = [Number(found[1]), Number(found[3])];
  const result = { '*': left * right, '+': left + right, '-': left - right }[found[2]];
  return result >= 0 && result < 10_000 ? `${result}=` : 'e=';
}

/** What `37*8+45=` comes to, as an answer. */
export function solved(text) {
  const [, left, factor, sign, last] = /^(\d+)\*(\d+)([+-])(\d+)=$/.exec(text);
  return `#${left * factor + (sign === '+' ? 1 : -1) * last}`;
}

/** One session: its reward. */
async function play(policy, model, asked) {
  let text = asked;
  for (let turn = 0; turn < TURNS; turn += 1) {
    const answer = await policy.completions.create({ model, prompt: text });
    const said = answer.choices[0].text;
    if (said.startsWith('#')) return Number(said === solved(asked));
    text += said + calculate(said);
  }
  return 0;
}

function post(url, key, said) {
  const headers = { authorization: `Bearer ${key}`, 'content-type': 'application/json' };
  return fetch(url, { method: 'POST', headers, body: JSON.stringify(said) });
}

/** Sessions one after another, until the run is over; how many were scored. */
async function work(url, key) {
  for (let scored = 0; ; ) {
    const said = { lease: randomUUID(), wait_s: 10 };
    const leased = await post(`${url}/asyncrl/v1/sessions`, key, said);
    if (leased.status === 410) return scored;
    if (leased.status === 204) continue;
    if (leased.status !== 200) {
      const why = (await leased.text()).slice(0, 200);
      throw new Hopeless(`${url}: no lease: ${leased.status} ${why}`);
    }
    const got = await leased.json();
    const policy = new OpenAI({ baseURL: got.base_url, apiKey: got.api_key, timeout: TIMEOUT_MS });
    const at = `${url}/s/${got.session}`;
    let reward = 0; // what a limit cut off is the policy's doing
    try {
      reward = await play(policy, got.model, got.task.text);
    } catch (error) {
      if (!(error instanceof OpenAI.APIError) || error.status === undefined) throw error;
      if (error.status === 410) continue; // this session is over, perhaps the run: the lease tells
      if (error.code !== 'session_limit') {
        await (await post(`${at}/end`, got.api_key, { failed: error.message })).text();
        // every session would meet these
        if ([401, 404].includes(error.status)) throw new Hopeless(`${at}: ${error.message}`);
        continue;
      }
    }
    const done = await post(`${at}/reward`, got.api_key, { reward });
    await done.text(); // so that its connection is free for others
    scored += Number(done.status === 200);
  }
}

async function main(run) {
  while (!existsSync(join(run, 'agent.url'))) await sleep(100);
  const read = (name) => readFileSync(join(run, name), 'utf8').trim();
  const [url, key] = [read('agent.url'), read('agent.key')];
  try {
    const each = await Promise.all(Array.from({ length: AT_ONCE }, () => work(url, key)));
    const scored = each.reduce((sum, count) => sum + count, 0);
    console.log(`${scored} sessions by openai ${VERSION} in node ${process.version}`);
  } catch (error) {
    const gone = `${url} has gone: ${error.message} ${error.cause ?? ''}`;
    console.error(error instanceof Hopeless ? error.message : gone);
    process.exit(1);
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  if (process.argv[2] === undefined) {
    console.error('usage: node agent.mjs RUN');
    process.exit(2);
  }
  await main(process.argv[2]);
}
