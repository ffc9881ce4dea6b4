//! Teacher-forced logits of every position, and the hidden states on the way.

use std::io::Write;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use fs_err::File;
use k3_formats::Error;
use k3_formats::container::Container;

use crate::cli::{Act8, LogitsArgs};
use crate::engine::{Engine, Inputs, Run, Want};
use crate::open;

pub(super) fn run(args: &LogitsArgs) -> anyhow::Result<()> {
    let container = Container::open(&args.engine.container)?;
    let rows = match &args.x0 {
        Some(path) => read_rows(path, container.config.hidden)?,
        None => Vec::new(),
    };
    let input = match &args.ids {
        Some(ids) => Inputs::Ids(&ids.0),
        None => Inputs::Rows(&rows),
    };
    let options = args.engine.with_context(positions(input, container.config.hidden));
    let mut engine = open::engine(&container, &options, Act8::Off)?;
    let mut out = create(&args.out)?;
    let mut trace = args.trace.as_deref().map(create).transpose()?;
    teacher_force(&mut engine, input, &mut out, trace.as_mut())?;
    out.flush()?;
    trace.map_or(Ok(()), |mut t| t.flush())?;
    Ok(())
}

fn positions(input: Inputs<'_>, hidden: usize) -> usize {
    match input {
        Inputs::Ids(ids) => ids.len(),
        Inputs::Rows(x) => x.len() / hidden,
    }
}

fn create(path: &Path) -> anyhow::Result<std::io::BufWriter<File>> {
    Ok(std::io::BufWriter::new(File::create(path)?))
}

fn read_rows(path: &Path, hidden: usize) -> anyhow::Result<Vec<f32>> {
    let bytes = fs_err::read(path)?;
    let row = hidden * 4;
    if bytes.is_empty() || bytes.len() % row != 0 {
        let problem = format!("expected whole rows of {row} bytes, found {} bytes", bytes.len());
        return Err(Error::mismatch(problem).in_file(path).into());
    }
    Ok(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

/// Takes all positions through the model in chunks and writes what comes out.
pub(crate) fn teacher_force(
    engine: &mut Engine<'_>,
    input: Inputs<'_>,
    out: &mut impl Write,
    mut trace: Option<&mut impl Write>,
) -> anyhow::Result<()> {
    let hidden = engine.model().config.hidden;
    let positions = positions(input, hidden);
    let (chunk, points) = (engine.max_rows(), engine.model().layers.len() + 1);
    let mut state = engine.new_state(positions);
    let cancel = AtomicBool::new(false);
    for start in (0..positions).step_by(chunk) {
        let rows = chunk.min(positions - start);
        let part = match input {
            Inputs::Ids(ids) => Inputs::Ids(&ids[start..start + rows]),
            Inputs::Rows(x) => Inputs::Rows(&x[start * hidden..(start + rows) * hidden]),
        };
        let mut seen = vec![0.0f32; if trace.is_some() { rows * points * hidden } else { 0 }];
        let mut observe = |point: usize, x: &[f32]| {
            for (row, x) in x.chunks_exact(hidden).enumerate() {
                seen[(row * points + point) * hidden..][..hidden].copy_from_slice(x);
            }
        };
        let mut run = [Run { state: &mut state, rows, want: Want::All }];
        let observer = trace.is_some().then_some(&mut observe as &mut crate::engine::Observer<'_>);
        let logits = engine.step(part, &mut run, &cancel, observer)?;
        write_f32s(out, logits).context("cannot write the logits")?;
        if let Some(trace) = &mut trace {
            write_f32s(*trace, &seen).context("cannot write the trace")?;
        }
    }
    Ok(())
}

fn write_f32s(out: &mut impl Write, values: &[f32]) -> std::io::Result<()> {
    #[cfg(target_endian = "little")]
    return out.write_all(bytemuck::cast_slice(values));
    #[cfg(target_endian = "big")]
    return values.iter().try_for_each(|v| out.write_all(&v.to_le_bytes()));
}
