"""The agent's conversation through LangChain's own client, unmodified.

    make langchain
    build/langchain/bin/python examples/agent/langchain_agent.py URL build/agent/full/prompts.json

URL is a server with --blend-find learned. LangChain has an environment of its own, because it wants
another version of the OpenAI client than SGLang does. `python -m examples.agent` writes the prompts.
Prints for each turn how many tokens of the prompt were found.
"""

import json
import sys
import time
import urllib.request
from typing import Any

from langchain_core.messages import convert_to_messages
from langchain_openai import ChatOpenAI


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    url, path = sys.argv[1:]
    server = {"base_url": f"{url}/v1", "api_key": "none"}
    model = ChatOpenAI(model="default", max_tokens=1, temperature=0.0, **server)
    with open(path) as file:
        prompts = json.load(file)
    for number, messages in enumerate(prompts, start=1):
        before = _settled(url)
        model.invoke(convert_to_messages(messages))
        after = _blending(url)
        told = {name: after[name] - before[name] for name in ("prompt_tokens", "found_tokens")}
        print(f"turn {number}: {told['found_tokens']} of {told['prompt_tokens']} tokens found")
    return 0


def _settled(url: str) -> dict[str, Any]:
    """Wait until the server builds nothing, as while an agent's tools run."""
    while (told := _blending(url))["chunks_pending"] + told["probes_pending"]:
        time.sleep(0.3)
    return told


def _blending(url: str) -> dict[str, Any]:
    """Return the server's totals of blending."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/server_info") as answer:
        told: dict[str, Any] = json.load(answer)["internal_states"][0]["sgl_blend"]
    return told


if __name__ == "__main__":
    sys.exit(main())
