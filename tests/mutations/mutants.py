"""All of them, room by room."""

import of_kinds
import of_model
import of_plan
import of_reading
import of_session
import of_transport

MUTANTS = [
    *of_model.MUTANTS,
    *of_kinds.MUTANTS,
    *of_plan.MUTANTS,
    *of_reading.MUTANTS,
    *of_session.MUTANTS,
    *of_transport.MUTANTS,
]
