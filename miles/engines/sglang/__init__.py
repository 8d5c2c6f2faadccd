"""A real SGLang server as an engine.

In our processes:

engine.py       the engine: what the controller and the router call
checkpoint.py   names and shapes of the model's tensors
flights.py      requests under way: cut and sent again around a publish, every token under its version
options.py      settings into the server's flags
known_options.py  whether the server knows an option, without starting it
versions.py     what differs between the versions of SGLang
starting.py     a server's start; those that share a GPU take turns
server.py       the server's process: started, watched, ended with us
client.py       HTTP: pooled, bounded, patient with passing faults
commands.py     what is asked of the loader in the server, and its answers

In the server's processes, by its own interpreter:

launcher.py     starts the server
loader.py       SGLang calls it for weights: receives, loads, checksums, compares
places.py       where each Hugging Face tensor lies in the server's fused parameters
sharded.py      one rank's end of a publish to a tensor parallel server
seeds.py        a seed for each request
"""
