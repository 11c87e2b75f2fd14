"""What proves the engine on a GPU: `python launch.py accept`.

checks.py  the checks in order of value, each a command with a limit
runner.py  runs them one after another, and writes what they found
causes.py  likely causes of what it found; read.py says them of a file
report.py  what a check prints, part by part
work.py    the checks that are no test and no command of their own, each in a process of its own
link.py    ... of copies, and of kernels that read host memory
launches.py ... of kernels launched by Triton and through the driver
parts.py   ... of attention, norms and rotary embeddings
decode.py  ... of tokens led by the GPU: the bits of those led by the host, and how many a second
joined.py  ... of experts that the host computes within such tokens: their bits, how many a second, a silent host
engines.py ... of whole engines: the same bits, speed, memory, one model in the place of another
drawn.py   the models that these load"""
