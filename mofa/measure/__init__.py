"""Real training runs, measured: torchtitan and Megatron-Core, unmodified, on this machine's GPUs."""

from mofa.measure.records import Record, read_record, read_records
from mofa.measure.runs import MeasureSummary, measure

__all__ = ["MeasureSummary", "Record", "measure", "read_record", "read_records"]
