//! Byte formats of Kimi K3: snapshots, the container, number formats, the tokenizer.
//!
//! This crate knows bytes. It has no threads, no terminal and no policy; the two
//! programs share nothing else. `README.md` beside it is the byte-level
//! specification of the container.
#![deny(missing_docs)]

pub mod calibration;
pub mod config;
pub mod container;
pub mod digest;
pub mod dtype;
mod error;
pub mod expert_table;
pub mod json;
pub mod mapping;
pub mod mxfp4;
pub mod pack;
pub mod quant;
pub mod recipe;
pub mod safetensors_header;
pub mod snapshot;
pub mod tensor_name;
pub mod text_file;
pub mod tokenizer;

pub use config::ModelConfig;
pub use error::{Error, ErrorKind, Result};
