"""What every suite shares.

run.py        a suite, one run of it, and the head of its result
figures.py    medians, paired ratios and their intervals; bounds
report.py     tables, goals and the claims of papers as lines of text
resume.py     rows on disk, so that an interrupted run continues
engines.py    what suites ask of a loaded engine, and what with
workload.py   one workload for many systems
process.py    one measurement in a process of its own, with cold files and a memory limit
protocol.py   what is written between the two"""
