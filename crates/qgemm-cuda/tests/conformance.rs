//! The conformance suite on the first CUDA device.

qgemm_testkit::conformance!("cuda:0");
