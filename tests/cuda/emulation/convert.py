#!/usr/bin/env python3
"""Copies headers and a .cu file so that g++ compiles them: kernel<<<blocks, threads, bytes, stream>>>(arguments) becomes a call.

usage: convert.py INCLUDE_DIRECTORY TEST.cu OUTPUT_DIRECTORY
"""

import pathlib
import re
import shutil
import sys


def end_of_parentheses(text, begin):
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError("a parenthesis is not closed")


def begin_of_name(text, end):
    """Where a name with template arguments begins that ends at `end`."""
    depth = 0
    begin = end
    while begin > 0:
        letter = text[begin - 1]
        depth += (letter == ">") - (letter == "<")
        if depth == 0 and letter != "<" and not (letter.isalnum() or letter in "_:"):
            break
        begin -= 1
    return begin


def with_calls(text):
    text = re.sub(r"detail::\s+(\w+<<<)", r"detail::\1", text)
    # A team of one warp is one lane: its scalar code wants lanes that run in step.
    text = re.sub(r"((?:rewrite_bodies|materialize_states)<<<[^;]*?, )32(, 0, teams)", r"\g<1>1\2", text)
    while "<<<" in text:
        launch = text.index("<<<")
        name = begin_of_name(text, launch)
        close = text.index(">>>", launch)
        arguments = text.index("(", close)
        end = end_of_parentheses(text, arguments)
        call = f"emulation::launch({text[launch + 3:close]}, [=] {{ {text[name:launch]}{text[arguments:end]}; }})"
        text = text[:name] + call + text[end:]
    return text


def converted(path):
    text = with_calls(path.read_text())
    if path.name == "async_copy.cuh":
        text = (pathlib.Path(__file__).parent / path.name).read_text()
    if path.name == "warp_team.cuh":
        text = text.replace("static constexpr int lanes = 32;", "static constexpr int lanes = 1;")
    if path.name == "rewrite_bodies.cuh":
        text = text.replace("r += 32", "r += 1")
    return text


def main():
    include, test, output = map(pathlib.Path, sys.argv[1:])
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(include, output / "include")
    for header in (output / "include").rglob("*.cuh"):
        header.write_text(converted(header))
    (output / (test.stem + ".cpp")).write_text(converted(test))


if __name__ == "__main__":
    main()
