"""What every suite shares.

run.py        a suite, one run of it, and the head of its result
figures.py    medians, paired ratios and their intervals
report.py     tables, goals and the claims of papers as lines of text
resume.py     rows on disk, so that an interrupted run continues
prompts.py    texts and answers that suites read
bounds.py     what no cache and no prefetcher can beat
process.py    one measurement in a process of its own, with cold files and a memory limit
protocol.py   what is written between the two
limits.py     the limit: a Linux control group
"""
