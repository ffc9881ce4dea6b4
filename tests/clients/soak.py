"""Thousands of bounded requests with clients that leave, dawdle or send nonsense.

Shows that memory stays flat, and that no reply is lost or mixed up with another.
"""

import json
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from served import Served

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 2400
PROMPTS = ["She", "Mr. Darcy", "It is a truth universally acknowledged, that",
           "Elizabeth was surprised to find that", "The weather at Bath " * 12]
NONSENSE = [b"", b"{", b"[]", b"\xff\xfe", b"[" * 50000, b"x" * (1 << 20), b'{"prompt": 1}',
            b'{"prompt": "x", "n": 3}', b'{"prompt": "x", "max_tokens": -5}', b'{"prompt": ""}']


def body(i, stream):
    return {"prompt": PROMPTS[i % 5], "seed": i % 7, "max_tokens": 4 + i % 5 * 8, "stream": stream}


def events(response):
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])["choices"][0]["text"]


def whole(served, i):
    status, answer = served.post("/v1/completions", body(i, False))
    assert status == 200, (status, answer)
    return json.loads(answer)["choices"][0]["text"]


def stream(served, i, pause=0.0):
    connection = served.connect()
    connection.request("POST", "/v1/completions", json.dumps(body(i, True)))
    response = connection.getresponse()
    assert response.status == 200, response.read()
    time.sleep(pause)
    text = "".join(events(response))
    connection.close()
    return text


def leave(served, i, after):
    """Closes the connection at once, or in the middle of the reply."""
    data = json.dumps({**body(i, True), "max_tokens": 400}).encode()
    client = socket.create_connection((served.host, served.port))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                   b"content-length: %d\r\n\r\n" % len(data) + data)
    end = time.time() + after
    try:
        while (left := end - time.time()) > 0:
            client.settimeout(left)
            if not client.recv(4096):
                break
    except TimeoutError:
        pass
    client.close()


def cut_head(served):
    client = socket.create_connection((served.host, served.port))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1000\r\n\r\n{")
    client.close()


def main():
    with Served("--slots", "2", "--context", "512", "--queue", "64", "--expert-cache", "64M") as served:
        combinations = [i for i in range(35)]
        want = {i: whole(served, i) for i in combinations}
        counts = {"whole": 0, "stream": 0, "slow": 0, "left": 0, "nonsense": 0}
        lock = threading.Lock()
        samples = []

        def one(number):
            chance = random.Random(number)
            i, kind = chance.randrange(35), chance.choices(list(counts), [30, 30, 10, 20, 10])[0]
            if kind == "whole":
                assert whole(served, i) == want[i], f"a reply of {i} is not its own"
            elif kind == "stream":
                assert stream(served, i) == want[i], f"a stream of {i} is not its own"
            elif kind == "slow":
                assert stream(served, i, pause=chance.random()) == want[i]
            elif kind == "left":
                leave(served, i, chance.choice([0.001, 0.02, 0.1, 0.3]))
            elif chance.random() < 0.2:
                cut_head(served)
            else:
                status, _ = served.post("/v1/completions", chance.choice(NONSENSE))
                assert status in (400, 413), status
            with lock:
                counts[kind] += 1
                done = sum(counts.values())
                if done % (COUNT // 24) == 0:
                    samples.append((done, served.resident()))

        began = time.time()
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(one, range(COUNT)))
        took = time.time() - began
        while served.metric('k3_slots{state="busy"}') > 0:
            time.sleep(0.05)
        print(f"{COUNT} requests in {took:.0f} s: {counts}")
        for done, resident in samples:
            print(f"  after {done:5}: {resident / 2**20:.2f} MiB")
        third = len(samples) // 3
        mean = lambda part: sum(resident for _, resident in part) / len(part)
        early, late = mean(samples[third:2 * third]), mean(samples[2 * third:])
        print(f"anonymous memory, middle third to last third: {(late / early - 1) * 100:+.2f} %")
        assert late < early * 1.02, "memory grows"
        left = served.metric('k3_replies_total{outcome="cancelled"}')
        print(f"cancelled {left:.0f}, waiting {served.metric('k3_queue_requests'):.0f}")
        assert served.metric('k3_replies_total{outcome="failed"}') == 0


main()
