"""scripts/check_layers and scripts/check_style hold on this tree, and each fails on planted faults."""
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEAD = "/* A file. */\n"

LAYER_FAULTS = {
    "upward": ("src/kv/a.c", HEAD + '#include "engine/engine.h"\n', "kv must not include engine"),
    "skips to the side": ("src/text/a.c", HEAD + '#include "backend/backend.h"\n', "text must not include backend"),
    "transport knows transport": ("src/front/http/a.c", HEAD + '#include "front/grpc/grpc.h"\n', "front/http must not include front/grpc"),
    "unknown folder": ("src/misc/a.c", HEAD, "not in the layer table"),
    "kernel looks up": ("kernels/gemm/a.cu", HEAD + '#include "backend/backend.h"\n', "kernels must not include backend"),
}
STYLE_FAULTS = {
    "long line": ("src/kv/a.c", HEAD + "int " + "x" * 140 + ";\n", "columns"),
    "long file": ("src/kv/a.c", HEAD + "int x;\n" * 1001, "the cap is 1000"),
    "malloc": ("src/kv/a.c", HEAD + "void *f(void)\n{\n  return malloc(3);\n}\n", "malloc outside base/mem.c"),
    "strcpy": ("src/kv/a.c", HEAD + "void f(char *a)\n{\n  strcpy(a, a);\n}\n", "strcpy is banned"),
    "exit": ("src/kv/a.c", HEAD + "void f(void)\n{\n  exit(1);\n}\n", "exit below the programs"),
    "no opening comment": ("src/kv/a.c", "int x;\n", "no opening comment"),
    "no guard": ("src/kv/a.h", HEAD + "int x;\n", "no include guard"),
    "tab": ("src/kv/a.c", HEAD + "int\tx;\n", "tab"),
    "trailing blanks": ("src/kv/a.c", HEAD + "int x; \n", "blanks at the end"),
    "mark": ("src/kv/a.c", HEAD + "/* TO" + "DO: later */\n", "unfinished mark"),
    "long function": ("src/kv/a.c", HEAD + "void f(void)\n{\n" + "  g();\n" * 101 + "}\n", "function f has"),
}


def run(script, root):
    done = subprocess.run([sys.executable, ROOT / "scripts" / script, root], capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("script", ["check_layers", "check_style"])
def test_tree_holds(script):
    code, out = run(script, ROOT)
    assert code == 0, out


@pytest.mark.parametrize("script,fault", [("check_layers", k) for k in LAYER_FAULTS] + [("check_style", k) for k in STYLE_FAULTS])
def test_planted_fault_is_found(script, fault, tmp_path):
    name, text, want = (LAYER_FAULTS if script == "check_layers" else STYLE_FAULTS)[fault]
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    code, out = run(script, tmp_path)
    assert code == 1 and want in out, out


def test_strings_and_comments_do_not_count(tmp_path):
    file = tmp_path / "src/kv/a.c"
    file.parent.mkdir(parents=True)
    file.write_text(HEAD + '/* never call malloc(3) */\nconst char *f(void)\n{\n  return "strcpy(a, b)";\n}\n')
    assert run("check_style", tmp_path) == (0, "")
