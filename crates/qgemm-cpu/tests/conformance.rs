//! The conformance suite on the CPU.

qgemm_testkit::conformance!("cpu");
