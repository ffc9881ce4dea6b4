//! `k3-prep inspect`

use std::io::{self, Write};

use anyhow::Result;
use k3_formats::safetensors_header::TensorInfo;
use serde::Serialize;

use crate::Outcome;
use crate::cli::InspectArgs;
use crate::inspect::{Inspection, inspect};
use crate::output;
use crate::size::Thousands;

/// One tensor of a JSON list.
#[derive(Serialize)]
struct Tensor {
    file: String,
    name: String,
    dtype: String,
    shape: Vec<usize>,
    begin: u64,
    end: u64,
}

#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    inspection: &'a Inspection,
    list: &'a [Tensor],
}

pub(super) fn run(args: &InspectArgs) -> Result<Outcome> {
    let mut list = Vec::new();
    let mut keep = |file: &str, t: &TensorInfo| {
        list.push(Tensor {
            file: file.to_owned(),
            name: t.name.clone(),
            dtype: t.dtype.to_string(),
            shape: t.shape.clone(),
            begin: t.begin,
            end: t.end,
        });
    };
    let mut ignore = |_: &str, _: &TensorInfo| {};
    let inspection = if args.tensors {
        inspect(&args.path, &mut keep)?
    } else {
        inspect(&args.path, &mut ignore)?
    };
    for problem in &inspection.problems {
        output::warn(problem);
    }
    match (args.json, args.tensors) {
        (true, true) => output::json(&Listed { inspection: &inspection, list: &list })?,
        (true, false) => output::json(&inspection)?,
        (false, _) => output::result(|out| {
            list.iter().try_for_each(|tensor| print(tensor, out))?;
            write!(out, "{inspection}")
        })?,
    }
    Ok(Outcome::Good)
}

fn print(t: &Tensor, out: &mut dyn Write) -> io::Result<()> {
    let bytes = Thousands(t.end - t.begin);
    writeln!(out, "{}  {}  {}  {:?}  {bytes}", t.file, t.name, t.dtype, t.shape)
}
