//! The toolkit as a library.

pub mod synth;
