"""Tokens per second of 1, 2, 4 and 8 replies side by side, in interleaved rounds."""

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from served import Served

CONTAINER = sys.argv[1]
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 3
TOKENS = int(sys.argv[3]) if len(sys.argv) > 3 else 24
ROWS = [1, 2, 4, 8]


def reply(served, number):
    ids = [(number * 977 + i * 131) % 5000 for i in range(4)]
    body = {"prompt": ids, "seed": number, "max_tokens": TOKENS, "logit_bias": {}}
    status, answer = served.post("/v1/completions", body)
    assert status == 200, answer
    return json.loads(answer)["usage"]["completion_tokens"]


def main():
    options = ["--slots", "8", "--context", "128", "--checkpoints", "0", *sys.argv[4:]]
    with Served(*options, container=CONTAINER) as served:
        rates = {rows: [] for rows in ROWS}
        reply(served, 0)
        for turn in range(ROUNDS):
            for rows in ROWS:
                began = time.time()
                with ThreadPoolExecutor(rows) as pool:
                    numbers = range(turn * 100 + rows * 10, turn * 100 + rows * 10 + rows)
                    tokens = sum(pool.map(lambda n: reply(served, n), numbers))
                rates[rows].append(tokens / (time.time() - began))
        one = statistics.median(rates[1])
        for rows in ROWS:
            middle = statistics.median(rates[rows])
            spread = f"{min(rates[rows]):.2f} to {max(rates[rows]):.2f}"
            print(f"| {rows} | {middle:.2f} | {spread} | {middle / one:.2f} |")


main()
