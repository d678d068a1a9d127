#!/usr/bin/env python3
"""Render every template of jinja_cases.jsonl with Python's jinja2 and write its answer beside it.

The first line of the file holds the variables. Run with a Python that has jinja2 3.1; add a case by appending {"t": "template"}.
"""
import datetime
import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENV = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
ENV.filters["tojson"] = tojson
ENV.globals["raise_exception"] = raise_exception
ENV.globals["strftime_now"] = datetime.datetime(2025, 1, 15, 12, 34, 56).strftime


def answer(template, variables):
    try:
        compiled = ENV.from_string(template)
    except Exception as e:
        return {"t": template, "error": f"{type(e).__name__}: {e}", "compiles": False}
    try:
        return {"t": template, "out": compiled.render(**variables)}
    except Exception as e:
        return {"t": template, "error": f"{type(e).__name__}: {e}", "compiles": True}


def main():
    path = pathlib.Path(__file__).with_name("jinja_cases.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [lines[0]] + [answer(row["t"], lines[0]["variables"]) for row in lines[1:]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
