"""Ask a blending server twice, with the documents in another order, through the OpenAI client.

    .venv/bin/python examples/openai_rag.py [http://127.0.0.1:30000]

The second answer's usage counts copied tokens if the server runs with --enable-cache-report.
"""

import sys
import time

from openai import OpenAI

import sgl_blend

SYSTEM = "You answer from the documents.\n"
DOCUMENTS = (
    "The harbour of Varna lies on the Black Sea. It was dredged in 1906, when ships grew larger. "
    * 2,
    "A capybara eats up to three kilograms of grass a day. It swims well and sleeps in water. " * 2,
    "Copper sheets on roofs turn green. A layer of brochantite forms on them over the years. " * 2,
)
QUESTION = "When was the harbour of Varna dredged?"

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
print("separator:", sgl_blend.configure(url))  # from /server_info
client = OpenAI(base_url=f"{url}/v1", api_key="none")
for order in ((0, 1, 2), (2, 0, 1)):
    chunks = "".join(sgl_blend.chunk(DOCUMENTS[number]) for number in order)
    prompt = SYSTEM + chunks + sgl_blend.plain(QUESTION)
    answer = client.completions.create(model="default", prompt=prompt, max_tokens=16, temperature=0)
    print("usage:", answer.usage and answer.usage.to_json(indent=None))
    print("answer:", answer.choices[0].text)
    time.sleep(2)  # the server stores new documents in the background
