"""What speculation is worth, and that it changes nothing, on a live server with a real model.

  equal  100 prompts, greedy: token ids without speculation, with prompt lookup, and with a draft model (--draft-model; default the model
         itself), several at once
  speed  one stream; passages to summarise and to quote, code to edit (four short functions, and thirty of 8 to 25 lines from bench/), each
         answer to its own end: tokens/s with and without prompt lookup, runs taken in turns, each answer's time the median of its rounds;
         `bound` is what the share of tokens that came from drafts would give if verifying cost nothing, `loops` how many answers end in a
         loop, which drafts follow easily, `ratio_without_loops` the gain without those, and `ratio_least` the gain by
         each answer's least time
  busy   as many streams as speculative-max-running, each replaced when it ends: sits2026-bench engine --scenario speculation

Prints one JSON object; --json FILE writes it. The servers run at the same time and take turns, so that what else the machine does meets
all of them alike."""
import argparse, ast, concurrent.futures, datetime, json, pathlib, statistics, subprocess, tempfile, urllib.request

from live_server import ROOT, Server

CODE = [
    ("total", """def average(values):
    s = 0
    n = 0
    for v in values:
        s = s + v
        n = n + 1
    if n == 0:
        return 0
    return s / n
"""),
    ("result", """def primes(limit):
    found = []
    for candidate in range(2, limit):
        is_prime = True
        for p in found:
            if candidate % p == 0:
                is_prime = False
                break
        if is_prime:
            found.append(candidate)
    return found
"""),
    ("words", """def count_words(path):
    counts = {}
    with open(path) as file:
        for line in file:
            for word in line.split():
                word = word.lower()
                counts[word] = counts.get(word, 0) + 1
    return counts
"""),
    ("matrix", """def transpose(rows):
    if not rows:
        return []
    width = len(rows[0])
    columns = []
    for i in range(width):
        column = []
        for row in rows:
            column.append(row[i])
        columns.append(column)
    return columns
"""),
]


def functions(n):
    """Of every so many functions of 8 to 25 lines in bench/: the first name that it assigns, and its text."""
    found = []
    for path in sorted((ROOT / "bench").glob("*.py")):
        source = path.read_text()
        for f in ast.walk(ast.parse(source)):
            if not isinstance(f, ast.FunctionDef) or not 8 <= f.end_lineno - f.lineno + 1 <= 25:
                continue
            names = [t.id for a in ast.walk(f) if isinstance(a, ast.Assign) for t in a.targets if isinstance(t, ast.Name)]
            if names:
                found.append((names[0], ast.get_source_segment(source, f)))
    return found[::max(1, len(found) // n)][:n]


def ends_in_loop(ids):
    return any(len(ids) >= 60 and ids[-q:] == ids[-2 * q:-q] == ids[-3 * q:-2 * q] for q in range(1, 20))


def ask(server, body):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def chat(text, max_tokens, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True,
            "return_timing": True, **more}


def passages(path, n, size):
    lines = [line.strip() for line in open(path, encoding="utf-8") if len(line) > size]
    if len(lines) < n:
        raise SystemExit(f"{path}: {n} lines of more than {size} characters are wanted, it has {len(lines)}")
    return [line[:size] for line in lines[:n]]


def metric(server, name):
    for line in server.text("/metrics").splitlines():
        if line.startswith(f"sits2026:{name}{{"):
            return int(float(line.rsplit(" ", 1)[1]))


def drafted(server):
    names = {"drafted": "draft_tokens", "accepted": "accepted_tokens", "guessed_by_model": "model_tokens"}
    return {key: metric(server, f"spec_decode_num_{name}_total") for key, name in names.items()}


def equal(servers, texts, n_prompts):
    bodies = [chat(f"Summarise this text:\n{t}" if i % 2 else f"Go on with this text:\n{t}", 48) for i, t in enumerate(texts[:n_prompts])]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ids = {name: list(pool.map(lambda b: ask(server, b)["choices"][0]["token_ids"], bodies)) for name, server in servers.items()}
    wanted = ids["off"]
    return {"prompts": len(bodies), "tokens": sum(map(len, wanted)),
            **{name: {"different": sum(a != b for a, b in zip(got, wanted)), **drafted(servers[name])}
               for name, got in ids.items() if name != "off"}}


def rate(answer):
    """Tokens/s behind the first token."""
    timing = answer["usage"]["timing"]
    return answer["usage"]["completion_tokens"] - 1, timing["total_ms"] - timing["time_to_first_token_ms"] - timing["delivery_ms"]


def speed(servers, texts, rounds):
    edit = "Rename the first variable of this function to {} and write out the whole function.\n\n{}"
    rename = "Rename the variable {} to {}_2 in this function and write out the whole function.\n\n{}"
    kinds = {"summarise": [chat(f"Summarise the following text. Quote its most important sentences.\n\n{t}", 96) for t in texts[:12]],
             "quote": [chat(f"{t}\n\nWrite out the text above once more, word for word.", 96) for t in texts[:4]],
             "edit code": [chat(edit.format(name, code), 96) for name, code in CODE],
             "edit longer code": [chat(rename.format(name, name, code), 160) for name, code in functions(30)]}
    out = {}
    for kind, bodies in kinds.items():
        before = drafted(servers["lookup"])
        tokens, times = {name: [0] * len(bodies) for name in servers}, {name: [[] for _ in bodies] for name in servers}
        loops = [False] * len(bodies)
        for _ in range(rounds):
            for i, body in enumerate(bodies):
                for name, server in servers.items():
                    answer = ask(server, body)
                    tokens[name][i], ms = rate(answer)
                    times[name][i].append(ms)
                    loops[i] = ends_in_loop(answer["choices"][0]["token_ids"])
        seconds = {name: [statistics.median(t) * 1e-3 for t in times[name]] for name in servers}
        out[kind] = {name: round(sum(tokens[name]) / sum(seconds[name]), 1) for name in servers}
        out[kind] |= {key: n - before[key] for key, n in drafted(servers["lookup"]).items() if key != "guessed_by_model"}
        n = rounds * sum(tokens["lookup"])
        out[kind]["bound"] = round(n / (n - out[kind]["accepted"]), 2)
        out[kind]["ratio"] = round(out[kind]["lookup"] / out[kind]["off"], 2)
        whole = {name: sum(s for s, is_loop in zip(seconds[name], loops) if not is_loop) for name in servers}
        least = {name: sum(map(min, times[name])) for name in servers}
        out[kind]["ratio_least"] = round(least["off"] / least["lookup"], 2)
        out[kind] |= {"answers": len(bodies), "loops": sum(loops), "ratio_without_loops": round(whole["off"] / whole["lookup"], 2)}
    return out


def busy(o, streams):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([str(o.bin / "sits2026-bench"), "engine", "--model", o.model, "--device", "cpu", "--scenario", "speculation",
                        "--text", o.text, "--streams", str(streams), "--draft", str(o.speculative_tokens), "--pairs", str(o.pairs),
                        "--texts", "36", "--output", "64", "--json", out.name], check=True)
        return json.load(open(out.name))["results"][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--text", required=True, help="lines of prose")
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin")
    parser.add_argument("--cases", default="equal,speed,busy")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=30, help="busy: pairs of runs")
    parser.add_argument("--speculative-tokens", type=int, default=6)
    parser.add_argument("--json")
    o = parser.parse_args()
    texts, cases = passages(o.text, 200, 600), o.cases.split(",")
    options = ("--device", "cpu", "--max-model-len", 2048, "--max-num-seqs", 16)
    spec = ("--speculative-tokens", o.speculative_tokens)
    servers = {"off": Server(o.bin, o.model, *options, "--speculative-tokens", 0), "lookup": Server(o.bin, o.model, *options, *spec)}
    if "equal" in cases:
        servers["draft model"] = Server(o.bin, o.model, *options, *spec, "--draft-model", o.draft_model or o.model)
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    out = {"date": datetime.date.today().isoformat(), "commit": commit, "machine": cpu,
           "command": "bench/speculation.py --cases " + o.cases,
           "model": pathlib.Path(o.model).name, "draft_model": pathlib.Path(o.draft_model or o.model).name,
           "speculative_tokens": o.speculative_tokens}
    if "equal" in cases:
        out["equal"] = equal(servers, texts, o.prompts)
        servers.pop("draft model").stop()
    if "speed" in cases:
        out["speed"] = speed(servers, texts, o.rounds)
    for server in servers.values():
        server.stop()
    if "busy" in cases:
        out["busy"] = busy(o, 8)
    text = json.dumps(out, indent=1)
    print(text)
    if o.json:
        pathlib.Path(o.json).write_text(text + "\n")


main()
