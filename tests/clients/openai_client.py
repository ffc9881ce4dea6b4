"""The official OpenAI client against the server, directly and through nginx.

Needs the package `openai`; without it the script says so and succeeds.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

try:
    import openai
except ImportError:
    print("skipped: no package `openai` (pip install openai)")
    sys.exit(0)

from served import CONTAINER, Served

TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "Weather of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}}]
ASK = [{"role": "user", "content": "Who is Mr. Darcy?"}]


def chat(client, **more):
    more.setdefault("messages", ASK)
    more.setdefault("max_completion_tokens", 12)
    return client.chat.completions.create(model="kimi-k3", **more)


def streamed(client, **more):
    """Reasoning, answer, finish reason and usage of a stream."""
    reasoning, answer, reason, usage = "", "", None, None
    options = {"include_usage": True}
    for chunk in chat(client, stream=True, stream_options=options, **more):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            answer += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return reasoning, answer, reason, usage


def whole(completion):
    message = completion.choices[0].message
    reasoning = getattr(message, "reasoning_content", None) or ""
    return reasoning, message.content or "", completion.choices[0].finish_reason, completion.usage


def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}")


def features(client, served):
    assert [m.id for m in client.models.list()] == ["kimi-k3"]
    assert client.models.retrieve("kimi-k3").id == "kimi-k3"
    for more in ({"seed": 1}, {"temperature": 0}, {"seed": 2, "reasoning_effort": "none"},
                 {"seed": 3, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
                 {"seed": 4, "reasoning_effort": "low", "stop": ["the"]}):
        a, b = whole(chat(client, **more)), streamed(client, **more)
        assert a[:3] == b[:3] and a[3].completion_tokens == b[3].completion_tokens, (a, b)
    chat(client, seed=1)
    thought = whole(chat(client, seed=1))[3]
    assert thought.completion_tokens_details.reasoning_tokens == thought.completion_tokens
    assert thought.prompt_tokens_details.cached_tokens > 0

    # Tools: the declaration, a required call, and a round trip with a result.
    chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    call = {"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": '{"town": "Bath"}'}}
    chat(client, tools=TOOLS, messages=ASK + [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"}])
    chat(client, response_format={"type": "json_object"})
    schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
    chat(client, response_format={"type": "json_schema", "json_schema": schema})

    logprobs = chat(client, logprobs=True, top_logprobs=3, reasoning_effort="none").choices[0].logprobs
    assert len(logprobs.content) == 12 and len(logprobs.content[0].top_logprobs) == 3
    text = client.completions.create(model="kimi-k3", prompt="She", max_tokens=8, seed=1)
    parts = client.completions.create(model="kimi-k3", prompt="She", max_tokens=8, seed=1, stream=True)
    assert text.choices[0].text == "".join(p.choices[0].text for p in parts)
    biased = client.completions.create(model="kimi-k3", prompt="She", max_tokens=3, temperature=0,
                                       logit_bias={"5": 100})
    assert biased.usage.completion_tokens == 3

    error = refused(openai.BadRequestError, lambda: chat(client, n=2))
    assert error.param == "n", error
    refused(openai.BadRequestError, lambda: chat(client, temperature=9))
    refused(openai.BadRequestError, lambda: chat(client, messages=[]))
    refused(openai.NotFoundError, lambda: client.models.retrieve("other"))

    stream = chat(client, stream=True, max_completion_tokens=2000)
    next(iter(stream))
    stream.close()
    began = time.time()
    while served.metric('k3_slots{state="busy"}') > 0:
        assert time.time() - began < 20, "a closed stream cancels its request"
        time.sleep(0.02)


def crowd(client):
    """Fifty requests at once on two slots; each is as when it is alone."""
    seeds = [i % 10 for i in range(50)]
    ask = lambda seed: whole(chat(client, seed=seed))[:3] if seed % 2 else streamed(client, seed=seed)[:3]
    alone = {seed: ask(seed) for seed in set(seeds)}
    with ThreadPoolExecutor(50) as pool:
        for seed, got in zip(seeds, pool.map(ask, seeds)):
            assert got == alone[seed], (seed, got, alone[seed])


def through_nginx(served, use):
    """The same behind a proxy that gives connections up after two silent seconds."""
    if not shutil.which("nginx"):
        print("skipped: no nginx")
        return
    with tempfile.TemporaryDirectory() as folder:
        port = served.port + 1 if served.port < 65000 else served.port - 1
        config = os.path.join(folder, "nginx.conf")
        temporary = "".join(f"{kind}_temp_path {folder}/{kind};"
                            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        with open(config, "w") as file:
            file.write(f"""daemon off; pid {folder}/pid; error_log {folder}/error.log;
            events {{}}
            http {{ access_log off; {temporary}
              server {{ listen 127.0.0.1:{port}; location / {{
                proxy_pass {served.url}; proxy_http_version 1.1; proxy_read_timeout 2s; }} }} }}""")
        nginx = subprocess.Popen(["nginx", "-c", config, "-e", f"{folder}/error.log"])
        try:
            time.sleep(0.5)
            use(openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0))
        finally:
            nginx.terminate()
            nginx.wait()


def waits_behind_a_long_one(client):
    """A stream and a document that get their slot after longer than the proxy's patience."""
    with open(os.path.join(CONTAINER, "generation_config.json")) as file:
        ends = json.load(file)["eos_token_id"]
    never = {str(token): -100 for token in (ends if isinstance(ends, list) else [ends])}
    first = chat(client, stream=True, max_completion_tokens=8000, seed=1, logit_bias=never)
    next(iter(first))
    with ThreadPoolExecutor(2) as pool:
        later = [pool.submit(lambda: whole(chat(client, seed=7))[:3]),
                 pool.submit(lambda: streamed(client, seed=7)[:3])]
        time.sleep(3.5)
        waited = not any(result.done() for result in later)
        first.close()
        a, b = (result.result() for result in later)
    assert a == b
    print("waited behind a long reply" if waited else "note: the machine was too fast to wait")


def main():
    with Served("--slots", "2", "--context", "2048", "--keep-alive", "1") as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        features(client, served)
        crowd(client)
        print("direct: ok")
        through_nginx(served, lambda proxied: (features(proxied, served), print("nginx: ok")))
    with Served("--context", "8192", "--keep-alive", "1", "--chunk", "1", "--threads", "1") as served:
        through_nginx(served, waits_behind_a_long_one)
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write("# keys\nsecret\n")
        keys.flush()
        with Served("--api-key-file", keys.name) as served:
            new = lambda key: openai.OpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0)
            refused(openai.AuthenticationError, lambda: chat(new("wrong")))
            chat(new("secret"))
    with Served("--queue", "1") as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        with ThreadPoolExecutor(12) as pool:
            calls = [pool.submit(chat, client, max_completion_tokens=200) for _ in range(12)]
            errors = [call.exception() for call in calls]
        full = [e for e in errors if isinstance(e, openai.RateLimitError)]
        assert full and all(int(e.response.headers["retry-after"]) >= 1 for e in full)
    print("all: ok")


main()
