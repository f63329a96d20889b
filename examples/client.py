"""OpenAI's SDK with a server of this machine: start `pyspec server demo`, then run this. A URL may be given: python client.py http://127.0.0.1:8080"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
# A key is only needed where the server was started with --api-key
client = OpenAI(base_url=f"{url}/v1", api_key="none")
messages = [{"role": "user", "content": "What is 3 x 4?"}]

# The whole answer at once.
answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=40)
print(answer.choices[0].message.content)

# The same answer as it comes.
for chunk in client.chat.completions.create(
    model="demo", messages=messages, temperature=0, max_tokens=40, stream=True
):
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
print()
