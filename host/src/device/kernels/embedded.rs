//! A kernel module in the program: its cubin, which the GPU runs, and its PTX, which the driver
//! compiles first.

use std::env;
use std::ffi::CString;

use miniz_oxide::inflate::decompress_to_vec_zlib;
use sha2::{Digest, Sha256};

use super::modules::refused;
use super::rank::with_rank;
use super::set::ModuleSource;
use super::sidecar::Sidecar;
use crate::device::context::Context;
use crate::error::{LaunchError, Result};
use crate::machine::variables::{JIT, switch};
use crate::sys::cuda::module::{Image, ModuleHandle};

pub(super) struct Embedded {
    pub(super) file: &'static str,
    pub(super) sidecar: Sidecar,
    /// Compressed with zlib, as the cubin is.
    ptx: &'static [u8],
    cubin: Option<&'static [u8]>,
}

impl Embedded {
    pub(super) fn parse(&(file, ptx, json, cubin): &ModuleSource) -> Result<Self> {
        Ok(Self { file, sidecar: Sidecar::parse(file, json)?, ptx, cubin })
    }

    /// Loads the cubin if it is for this GPU. Otherwise, and when it is damaged or refused, the
    /// driver compiles the PTX, which takes over a minute for a large matrix product.
    pub(super) fn load(&self, context: &Context) -> Result<ModuleHandle> {
        let device = context.limits().compute_capability;
        // CUDA's own variable for this also keeps NCCL from loading its kernels.
        let compile = switch(&|name| env::var_os(name), JIT)?;
        let cubin = self.cubin.filter(|_| !compile && self.sidecar.cubin_runs_on(device));
        match cubin.map(|cubin| self.load_cubin(context, cubin)) {
            Some(Ok(module)) => return Ok(module),
            Some(Err(why)) => tracing::warn!(
                "the driver compiles the PTX of kernel module {}, since its cubin for {} cannot be \
                 used: {why}",
                self.file,
                self.sidecar.arch
            ),
            None => {}
        }
        self.load_ptx(context)
    }

    fn load_cubin(&self, context: &Context, packed: &[u8]) -> Result<ModuleHandle> {
        let cubin = decompress_to_vec_zlib(packed).map_err(|error| self.invalid(error))?;
        // The driver gets no length: it must be the whole cubin, and the one of this description.
        let hash: String = Sha256::digest(&cubin).iter().map(|b| format!("{b:02x}")).collect();
        if self.sidecar.cubin_sha256.as_ref() != Some(&hash) {
            return Err(self.invalid("the hash of the cubin is not that of its description"));
        }
        let loaded = context.cuda().load_module(Image::Cubin(&cubin));
        loaded.map_err(|failure| refused(self.file, &self.sidecar.ptx_isa, failure))
    }

    fn load_ptx(&self, context: &Context) -> Result<ModuleHandle> {
        let text = decompress_to_vec_zlib(self.ptx).map_err(|error| self.invalid(error))?;
        let text = String::from_utf8(text).map_err(|error| self.invalid(error))?;
        let image = CString::new(with_rank(&text, context.rank()).into_owned());
        let image = image.map_err(|error| self.invalid(error))?;
        let loaded = context.cuda().load_module(Image::Ptx(&image));
        loaded.map_err(|failure| refused(self.file, &self.sidecar.ptx_isa, failure))
    }

    fn invalid(&self, why: impl ToString) -> crate::error::Error {
        let (file, name) = (self.file.to_owned(), why.to_string());
        LaunchError::ModuleRejected { file, name, log: String::new() }.into()
    }
}
