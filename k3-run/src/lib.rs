//! Runs Kimi K3 on CPUs: maps a converted container and streams experts from the
//! original shards.

pub mod kernels;
pub mod linear;
pub mod parallel;
