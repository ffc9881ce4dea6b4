// The chat page. All text of the model and of the user goes through textContent, so none
// of it can become markup.
'use strict';

const $ = (id) => document.getElementById(id);
const storage = sessionStorage;
let messages = JSON.parse(storage.getItem('messages') || '[]');
let running = null;

function element(kind, className, text) {
  const made = document.createElement(kind);
  made.className = className;
  if (text) made.textContent = text;
  return made;
}

function headers() {
  const key = $('key').value.trim();
  const plain = { 'content-type': 'application/json' };
  return key ? { ...plain, authorization: 'Bearer ' + key } : plain;
}

// One message on the page, with the means to add to it.
function show(role) {
  const article = element('article', role);
  const reasoning = element('details', 'reasoning');
  const summary = element('summary', '', 'Reasoning');
  const thoughts = element('div', 'text');
  reasoning.append(summary, thoughts);
  reasoning.hidden = true;
  const text = element('div', 'text');
  const note = element('div', 'note');
  article.append(reasoning, text, note);
  $('messages').append(article);
  return {
    article, note,
    think(more) { reasoning.hidden = false; thoughts.append(more); },
    say(more) { text.append(more); },
    fail(message) { note.classList.add('wrong'); note.textContent = message; },
  };
}

function keep() {
  storage.setItem('messages', JSON.stringify(messages));
}

function request() {
  const system = $('system').value.trim();
  const limit = parseInt($('limit').value, 10);
  const body = {
    messages: (system ? [{ role: 'system', content: system }] : []).concat(messages),
    stream: true,
    stream_options: { include_usage: true },
    reasoning_effort: $('effort').value,
  };
  if (limit > 0) body.max_completion_tokens = limit;
  return JSON.stringify(body);
}

// Calls `each` for every line of a response that is complete.
async function lines(response, each) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split('\n');
    rest = parts.pop();
    parts.forEach((line) => each(line.replace(/\r$/, '')));
  }
}

async function problem(response) {
  const body = await response.json().catch(() => null);
  const message = body && body.error ? body.error.message : response.statusText;
  const retry = response.headers.get('retry-after');
  return retry ? `${message} (in ${retry} s)` : message;
}

function rates(began, first, usage) {
  const now = performance.now();
  const parts = [];
  if (first) parts.push(`first token after ${((first - began) / 1000).toFixed(1)} s`);
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    const thought = usage.completion_tokens_details.reasoning_tokens;
    parts.push(`prompt ${usage.prompt_tokens} tokens, ${cached} reused`);
    parts.push(`reply ${usage.completion_tokens}, ${thought} of them reasoning`);
    if (usage.completion_tokens > 1 && now > first) {
      const rate = (usage.completion_tokens - 1) / ((now - first) / 1000);
      parts.push(`${rate.toFixed(rate < 10 ? 2 : 0)} tokens/s`);
    }
  }
  return parts.join(' · ');
}

async function send(prompt) {
  messages.push({ role: 'user', content: prompt });
  show('user').say(prompt);
  keep();
  const shown = show('assistant');
  const reply = { role: 'assistant', content: '', reasoning_content: '' };
  running = new AbortController();
  busy(true);
  const began = performance.now();
  let first = 0;
  let usage = null;
  const follow = () => {
    const box = $('messages');
    if (box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
  };
  const take = (line) => {
    if (line.startsWith(':')) {
      shown.note.textContent = line.slice(1).trim();
      return;
    }
    if (!line.startsWith('data: ') || line === 'data: [DONE]') return;
    const chunk = JSON.parse(line.slice(6));
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage || usage;
    const delta = chunk.choices.length ? chunk.choices[0].delta : {};
    if (delta.reasoning_content || delta.content) {
      first = first || performance.now();
      shown.note.textContent = '';
    }
    if (delta.reasoning_content) {
      reply.reasoning_content += delta.reasoning_content;
      shown.think(delta.reasoning_content);
    }
    if (delta.content) {
      reply.content += delta.content;
      shown.say(delta.content);
    }
    follow();
  };
  try {
    const options = { method: 'POST', headers: headers(), body: request(), signal: running.signal };
    const response = await fetch('v1/chat/completions', options);
    if (!response.ok) throw new Error(await problem(response));
    await lines(response, take);
    shown.note.textContent = rates(began, first, usage);
  } catch (error) {
    if (error.name === 'AbortError') shown.note.textContent = 'stopped · ' + rates(began, first, usage);
    else shown.fail(error.message);
  }
  $('stats').textContent = rates(began, first, usage);
  if (reply.content || reply.reasoning_content) messages.push(reply);
  keep();
  running = null;
  busy(false);
}

function busy(on) {
  $('stop').hidden = !on;
  $('send').disabled = on;
  $('clear').disabled = on;
  if (on) $('stats').textContent = '';
  else $('prompt').focus();
}

async function state() {
  try {
    const health = await (await fetch('health')).json();
    const { all, busy: used } = health.slots;
    $('state').textContent = `${health.status}, ${used}/${all} slots busy, ${health.queued} waiting`;
    if (!$('model').textContent) {
      const models = await fetch('v1/models', { headers: headers() });
      if (models.ok) $('model').textContent = (await models.json()).data[0].id;
    }
  } catch {
    $('state').textContent = 'the server does not answer';
  }
}

$('form').addEventListener('submit', (event) => {
  event.preventDefault();
  const prompt = $('prompt').value;
  if (running || !prompt.trim()) return;
  $('prompt').value = '';
  send(prompt);
});
$('prompt').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $('form').requestSubmit();
  }
});
$('stop').addEventListener('click', () => running && running.abort());
$('clear').addEventListener('click', () => {
  messages = [];
  keep();
  $('messages').replaceChildren();
});
$('theme').addEventListener('click', () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === 'dark'
    || (!document.documentElement.dataset.theme && matchMedia('(prefers-color-scheme: dark)').matches);
  document.documentElement.dataset.theme = dark ? 'light' : 'dark';
  storage.setItem('theme', document.documentElement.dataset.theme);
});
for (const id of ['system', 'key', 'limit', 'effort']) {
  const kept = storage.getItem(id);
  if (kept !== null) $(id).value = kept;
  $(id).addEventListener('change', () => storage.setItem(id, $(id).value));
}
if (storage.getItem('theme')) document.documentElement.dataset.theme = storage.getItem('theme');
for (const { role, content, reasoning_content: thoughts } of messages) {
  const shown = show(role);
  if (thoughts) shown.think(thoughts);
  shown.say(content);
}
state();
setInterval(state, 5000);
