"""The table of metrics: what is measured of each forward pass, and where each figure goes.

A metric that is counted is a field of StepRecord (`record`) whose metadata is `metric(...)`; one that follows from the
routing is an entry of REQUESTS or ROUTED (`table`). From METRICS, all of them, follow:

    the columns of the table `steps`     app.store.steps; a new metric's column is added when the store opens
    the columns of tokens.csv            app.services.exports.tables, with their descriptions
    the timelines of the live frames     core.runtime.telemetry
    the statistics of an answer          core.engine.answer
    results of simulations               core.simulate.prefetchers and the what-if table, where the cache counts it
    docs/metrics.md                      app.cli.metrics

A new metric takes its field and the line that counts it: in core.runtime.recorder, or in core.cache.counts.
"""

from core.metrics.metric import Metric as Metric
from core.metrics.metric import Outcome as Outcome
from core.metrics.record import Origin as Origin
from core.metrics.record import Phase as Phase
from core.metrics.record import StepRecord as StepRecord
from core.metrics.record import Transfer as Transfer
from core.metrics.table import BY_NAME as BY_NAME
from core.metrics.table import COUNTED as COUNTED
from core.metrics.table import HIT_RATE as HIT_RATE
from core.metrics.table import METRICS as METRICS
from core.metrics.table import REQUESTS as REQUESTS
from core.metrics.table import ROUTED as ROUTED
from core.metrics.table import reduced as reduced
from core.metrics.table import share as share
from core.metrics.table import values as values
