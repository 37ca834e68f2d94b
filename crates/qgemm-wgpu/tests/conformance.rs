//! The conformance suite on the first adapter.

qgemm_testkit::conformance!("wgpu:0");
