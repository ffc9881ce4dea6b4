//! The shards of a snapshot: which tensors each holds, in which order, at which bytes.

use std::cmp::Reverse;

use anyhow::Result;
use k3_formats::config::ModelConfig;
use k3_formats::tensor_name::{ExpertPart, TensorSpec, dense_tensors, expert_tensor_name};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::dims::Dims;
use super::vision;

/// Headers are padded with spaces to a multiple of this.
const HEADER_ALIGN: usize = 8;

/// One tensor of a shard.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
}

impl Tensor {
    pub(super) fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bitsize() as u64 / 8
    }
}

impl From<TensorSpec> for Tensor {
    fn from(spec: TensorSpec) -> Self {
        Self { name: spec.name, dtype: spec.dtype, shape: spec.shape }
    }
}

/// The release's layout: a shard per decoder layer, then embeddings, norm and head, then
/// the image projector, then the vision tower.
pub(super) struct Layout<'a> {
    dims: &'a Dims,
    config: &'a ModelConfig,
    dense: Vec<TensorSpec>,
}

/// One shard.
pub(super) struct Shard {
    pub(super) file: String,
    /// In data order.
    pub(super) tensors: Vec<Tensor>,
}

impl<'a> Layout<'a> {
    pub(super) fn new(dims: &'a Dims, config: &'a ModelConfig) -> Self {
        Self { dims, config, dense: dense_tensors(config) }
    }

    /// Number of shards.
    pub(super) fn len(&self) -> usize {
        self.config.layers() + 3
    }

    /// All shards, each made when asked for: the release has half a million tensors.
    pub(super) fn shards(&self) -> impl DoubleEndedIterator<Item = Shard> + '_ {
        (0..self.len()).map(|i| self.shard(i))
    }

    /// Shard `i`, counted from 0. F32 comes before BF16 before U8, and names are sorted
    /// within: experts lie in the order 0, 1, 10, 100, with the parts of one together.
    pub(super) fn shard(&self, i: usize) -> Shard {
        let layers = self.config.layers();
        let dense = |layer: Option<usize>| {
            self.dense.iter().filter(move |t| t.layer == layer).cloned().map(Tensor::from)
        };
        let mut tensors: Vec<Tensor> = match i.checked_sub(layers) {
            None => dense(Some(i)).chain(self.experts(i)).collect(),
            Some(0) => dense(None).collect(),
            Some(1) => vision::projector(self.dims),
            Some(_) => vision::tower(self.dims),
        };
        tensors.sort_by(|a, b| {
            let key = |t: &Tensor| Reverse(t.dtype.bitsize());
            (key(a), &a.name).cmp(&(key(b), &b.name))
        });
        let file = format!("model-{:05}-of-{:06}.safetensors", i + 1, self.len());
        Shard { file, tensors }
    }

    fn experts(&self, layer: usize) -> impl Iterator<Item = Tensor> + '_ {
        let count = if self.config.is_moe(layer) { self.config.moe.experts } else { 0 };
        (0..count).flat_map(move |expert| {
            ExpertPart::ALL.map(|part| Tensor {
                name: expert_tensor_name(layer, expert, part),
                dtype: Dtype::U8,
                shape: part.shape(self.config).to_vec(),
            })
        })
    }
}

impl Shard {
    /// Bytes of all tensors.
    pub(super) fn data_bytes(&self) -> u64 {
        self.tensors.iter().map(Tensor::bytes).sum()
    }

    /// The header's compact JSON, in data order, padded with spaces.
    ///
    /// # Errors
    /// A tensor too large for the format.
    pub(super) fn header(&self) -> Result<Vec<u8>> {
        let mut end = 0;
        let entries = self.tensors.iter().map(|t| {
            let begin = end;
            end = begin + usize::try_from(t.bytes())?;
            let shape = t.shape.clone();
            let info = TensorInfo { dtype: t.dtype, shape, data_offsets: (begin, end) };
            Ok((t.name.clone(), info))
        });
        let metadata = Metadata::new(None, entries.collect::<Result<_>>()?)?;
        let mut json = serde_json::to_vec(&metadata)?;
        json.resize(json.len().next_multiple_of(HEADER_ALIGN), b' ');
        Ok(json)
    }
}

#[cfg(test)]
mod tests {
    use k3_formats::digest::Digest;

    use super::super::dims::Preset;
    use super::super::files;
    use super::*;
    use crate::release;

    #[test]
    fn headers_of_the_full_preset_are_those_of_the_release() {
        let dims = Preset::Full.dims();
        let config = ModelConfig::parse(&files::config(&dims).to_string()).unwrap();
        let layout = Layout::new(&dims, &config);
        let (mut shards, mut tensors) = (0, 0);
        for shard in layout.shards() {
            let header = shard.header().unwrap();
            let bytes = 8 + header.len() as u64 + shard.data_bytes();
            let released = release::shard(&config, &shard.file, bytes);
            let expected = released.map(|r| r.header_sha256);
            assert_eq!(expected, Some(Digest::of(&header)), "{}: {bytes} bytes", shard.file);
            shards += 1;
            tensors += shard.tensors.len();
        }
        assert_eq!((shards, tensors), (96, 497_220));
    }
}
