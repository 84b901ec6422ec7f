"""Real training runs, measured: torchtitan and Megatron-Core, unmodified, on this machine's GPUs."""

from mofa.measure.records import RunRecord, read_record, read_records
from mofa.measure.runs import KeptBesideRecords, MeasureSummary, measure_runs

__all__ = ["KeptBesideRecords", "MeasureSummary", "RunRecord", "measure_runs", "read_record", "read_records"]
