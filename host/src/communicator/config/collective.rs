//! The configuration of one collective.

use std::ffi::{c_int, c_void};

use super::{CtaPolicy, Loaded, LoweredCollectiveConfig, check_cluster, check_ctas, int, text};
use crate::error::{Error, Result};
use crate::sys::nccl::DEV_COMM_VERSION;
use crate::sys::nccl::lists_config::LoweredValue;
use devcomm_sys::nccl::CollConfig;

/// The value of a vendor-specific option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VendorValue {
    /// A number.
    Int(i32),
    /// A string.
    Text(String),
}

impl From<i32> for VendorValue {
    fn from(value: i32) -> Self {
        Self::Int(value)
    }
}

impl From<&str> for VendorValue {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<String> for VendorValue {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

/// The configuration of one collective. Every rank passes the same one; NCCL does not compare them.
///
/// ```
/// use devcomm_host::CollectiveConfig;
/// let config =
///     CollectiveConfig::new().max_ctas(4).alg_selection("ring").force_alg_selection(false);
/// ```
///
/// NCCL: `ncclCollConfig_t` as of 2.32.3; an older library has no collectives that take it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[doc(alias = "ncclCollConfig_t")]
#[must_use]
pub struct CollectiveConfig {
    min_ctas: Option<u32>,
    max_ctas: Option<u32>,
    nvls_ctas: Option<u32>,
    cga_cluster_size: Option<u32>,
    alg_selection: Option<String>,
    force_alg_selection: Option<bool>,
    cta_policy: Option<CtaPolicy>,
    user_profiler_tag: u64,
    /// The event's address; 0 for none.
    launch_completion_event: usize,
    /// Vendor, option and value.
    vendor_options: Vec<(i32, i32, VendorValue)>,
}

/// Declares the setters of single fields, each with NCCL's name.
macro_rules! settings {
    ($( $(#[doc = $doc:literal])* $name:ident($value:ident: $type:ty) = $field:literal; )*) => {
        impl CollectiveConfig {
            $(
                $(#[doc = $doc])*
                ///
                #[doc = concat!("NCCL: `", $field, "`.")]
                #[doc(alias = $field)]
                pub fn $name(mut self, $value: $type) -> Self {
                    self.$name = Some($value);
                    self
                }
            )*
        }
    };
}

settings! {
    /// The fewest thread blocks, at least 1. Default: the communicator's.
    min_ctas(count: u32) = "minCTAs";

    /// The most thread blocks, at least 1 and at least `min_ctas`. Default: the communicator's,
    /// which is also the upper limit.
    max_ctas(count: u32) = "maxCTAs";

    /// Thread blocks if the collective runs over NVLS, at least 1. Default: the communicator's.
    nvls_ctas(count: u32) = "nvlsCTAs";

    /// Thread blocks in a cluster, 0 to 8; the same for all collectives of a group. Default: the
    /// communicator's.
    cga_cluster_size(blocks: u32) = "cgaClusterSize";

    /// Whether an `alg_selection` that NCCL cannot use is an error; if not, NCCL chooses. Default:
    /// true.
    force_alg_selection(force: bool) = "forceAlgSelection";

    /// How multiprocessors are used; not [`CtaPolicy::DEFAULT`], which NCCL refuses here. Default:
    /// the communicator's.
    cta_policy(policy: CtaPolicy) = "CTAPolicy";
}

impl CollectiveConfig {
    /// Returns NCCL's defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets which algorithms may be used, in NCCL's notation. Default: any.
    ///
    /// NCCL: `algSelection`.
    #[doc(alias = "algSelection")]
    pub fn alg_selection(mut self, selection: impl Into<String>) -> Self {
        self.alg_selection = Some(selection.into());
        self
    }

    /// Sets a value that profiler plugins get with the events of this call. The highest bit is
    /// reserved for NCCL and must be 0. Default: 0, no tag.
    ///
    /// NCCL: `userProfilerTag`.
    #[doc(alias = "userProfilerTag")]
    pub fn user_profiler_tag(mut self, tag: u64) -> Self {
        self.user_profiler_tag = tag;
        self
    }

    /// Sets a CUDA event (`cudaEvent_t`, `CUevent`) that is recorded when the collective's
    /// kernel has been launched (before it, if CUDA is older than 12.3). Either every rank passes
    /// an event or none does; in a group, at most one collective of a communicator has an event.
    ///
    /// NCCL: `launchCompletionEvent`.
    ///
    /// # Safety
    ///
    /// The event was created on the communicator's device, with timing disabled and without the
    /// interprocess flag. It lives until every collective with this configuration, every wait for
    /// the event and every graph that captured it has ended.
    #[doc(alias = "launchCompletionEvent")]
    pub unsafe fn launch_completion_event(mut self, event: *mut c_void) -> Self {
        self.launch_completion_event = event as usize;
        self
    }

    /// Adds a vendor-specific option, which NVIDIA's NCCL ignores. Each pair of vendor and option
    /// is set at most once.
    ///
    /// NCCL: `ncclConfigExt_t`.
    #[doc(alias = "ncclConfigExt_t")]
    pub fn vendor_option(
        mut self,
        vendor: i32,
        option: i32,
        value: impl Into<VendorValue>,
    ) -> Self {
        self.vendor_options.push((vendor, option, value.into()));
        self
    }

    /// Converts to NCCL's struct, for this library.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported) where collectives take no
    /// configuration, [`Error::InvalidInput`] for an invalid setting.
    pub(crate) fn lower(&self, library: Loaded<'_>) -> Result<LoweredCollectiveConfig> {
        let what = "a collective with a configuration (ncclCollConfig_t)";
        // All structs of this crate have the layout of this version.
        library.require(what, DEV_COMM_VERSION)?;
        self.check()?;
        let mut raw = CollConfig::new();
        let set = |slot: &mut c_int, name, value: Option<u32>| -> Result<()> {
            value.map_or(Ok(()), |value| int(name, value).map(|value| *slot = value))
        };
        set(&mut raw.min_ctas, "min_ctas", self.min_ctas)?;
        set(&mut raw.max_ctas, "max_ctas", self.max_ctas)?;
        set(&mut raw.nvls_ctas, "nvls_ctas", self.nvls_ctas)?;
        set(&mut raw.cga_cluster_size, "cga_cluster_size", self.cga_cluster_size)?;
        if let Some(force) = self.force_alg_selection {
            raw.force_alg_selection = force.into();
        }
        if let Some(policy) = self.cta_policy {
            raw.cta_policy = int("cta_policy", policy)?;
        }
        raw.user_profiler_tag = self.user_profiler_tag;
        raw.launch_completion_event = self.launch_completion_event as *mut c_void;
        let selection = self.alg_selection.as_deref();
        let selection = selection.map(|value| text("alg_selection", value)).transpose()?;
        let options = self.vendor_options.iter().map(|(vendor, option, value)| {
            let value = match value {
                VendorValue::Int(value) => LoweredValue::Int(*value),
                VendorValue::Text(value) => LoweredValue::Text(text("vendor_option", value)?),
            };
            Ok((*vendor, *option, value))
        });
        Ok(LoweredCollectiveConfig::new(raw, selection, options.collect::<Result<_>>()?))
    }

    fn check(&self) -> Result<()> {
        check_ctas(self.min_ctas, self.max_ctas, self.nvls_ctas)?;
        check_cluster(self.cga_cluster_size)?;
        if self.cta_policy == Some(CtaPolicy::DEFAULT) {
            return Err(Error::invalid(
                "cta_policy(DEFAULT): a collective takes EFFICIENCY or ZERO, or inherits the \
                 communicator's",
            ));
        }
        if self.user_profiler_tag >> 63 == 1 {
            let tag = self.user_profiler_tag;
            return Err(Error::invalid(format!(
                "user_profiler_tag({tag:#x}): the highest bit is reserved for NCCL"
            )));
        }
        for (n, (vendor, option, _)) in self.vendor_options.iter().enumerate() {
            let earlier = &self.vendor_options[..n];
            if earlier.iter().any(|(v, o, _)| (v, o) == (vendor, option)) {
                return Err(Error::invalid(format!(
                    "vendor_option: option {option} of vendor {vendor} is given twice"
                )));
            }
        }
        Ok(())
    }
}
