"""Two replicas of the demo model in Ray Serve, and an answer of theirs: `pip install '.[ray]'`, then run this.

With a port as argument it uses a Ray Serve that listens there.
"""

import json
import sys
import urllib.request

from ray import serve

from pyspec.serve.ray import app

port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000

# a GPU each where Ray has some; chats return to the replica that knows them
serve.run(
    app({"model": "demo", "np": 4, "replicas": 2, "cpus": 0, "router": "prefix"}), route_prefix="/"
)

body = {"messages": [{"role": "user", "content": "Count from 1 to 10."}], "temperature": 0}
request = urllib.request.Request(
    f"http://127.0.0.1:{port}/v1/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"},
)
with urllib.request.urlopen(request, timeout=60) as answer:
    print(json.loads(answer.read())["choices"][0]["message"]["content"])

serve.shutdown()
