//! The conformance suite on this backend.

qgemm_testkit::conformance!("cpu");
