//! The GPU architectures that kernels can be compiled for.

use std::fmt;
use std::str::FromStr;

use devcomm_locate::PTXAS_MIN;

use crate::error::Error;

/// The target that rustc compiles kernels for.
pub(crate) const TARGET: &str = "nvptx64-nvidia-cuda";

macro_rules! architectures {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, ptx $ptx:literal;)*) => {
        /// A GPU architecture, named as in the Rust-CUDA project: `Compute90` is `sm_90`.
        ///
        /// PTX of a plain architecture runs on it and on every newer one. The `a` suffix enables
        /// architecture-specific instructions (Hopper's `wgmma`); such PTX runs on that
        /// architecture only.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum NvvmArch {
            $($(#[$doc])* $variant,)*
        }

        impl NvvmArch {
            /// Every architecture that the builder knows, oldest first.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the name for LLVM and `ptxas`, `sm_90`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the oldest PTX version with this architecture, times ten.
            const fn oldest_ptx(self) -> u32 {
                match self { $(Self::$variant => $ptx,)* }
            }
        }
    };
}

architectures! {
    /// Ampere, A100.
    Compute80 = "sm_80", ptx 70;
    /// Ampere, consumer and workstation GPUs.
    Compute86 = "sm_86", ptx 71;
    /// Ampere, Jetson Orin.
    Compute87 = "sm_87", ptx 74;
    /// Ada.
    Compute89 = "sm_89", ptx 78;
    /// Hopper.
    Compute90 = "sm_90", ptx 78;
    /// Hopper with its architecture-specific instructions.
    Compute90a = "sm_90a", ptx 80;
    /// Blackwell, B200.
    Compute100 = "sm_100", ptx 86;
    /// Blackwell, B200, with its architecture-specific instructions.
    Compute100a = "sm_100a", ptx 86;
    /// Blackwell, B300.
    Compute103 = "sm_103", ptx 88;
    /// Blackwell, B300, with its architecture-specific instructions.
    Compute103a = "sm_103a", ptx 88;
    /// Blackwell, consumer and workstation GPUs.
    Compute120 = "sm_120", ptx 87;
    /// Blackwell, consumer and workstation GPUs, with their architecture-specific instructions.
    Compute120a = "sm_120a", ptx 87;
}

/// NCCL's device code needs PTX 8.6: 128-bit atomics and acquire or release fences.
const NCCL_PTX: u32 = 86;

impl NvvmArch {
    /// Returns the target feature for the oldest sufficient PTX version, so that the oldest
    /// possible driver can load the result.
    pub(crate) fn ptx_feature(self) -> String {
        format!("+ptx{}", self.oldest_ptx().max(NCCL_PTX))
    }

    /// Returns the CUDA version of the oldest `ptxas` with this architecture.
    pub(crate) const fn oldest_ptxas(self) -> (u32, u32) {
        // CUDA 12.8 has PTX 8.7, and CUDA 12.9 has PTX 8.8.
        if self.oldest_ptx() > 87 { (12, 9) } else { PTXAS_MIN }
    }
}

impl fmt::Display for NvvmArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for NvvmArch {
    type Err = Error;

    /// Reads `sm_90a`, `compute_90a` or `90a`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let digits = text.trim_start_matches("sm_").trim_start_matches("compute_");
        let named = |arch: &&Self| arch.name().trim_start_matches("sm_") == digits;
        Self::ALL.iter().find(named).copied().ok_or_else(|| Error::UnknownArch {
            name: text.to_owned(),
            known: Self::ALL.iter().map(|arch| arch.name()).collect::<Vec<_>>().join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::NvvmArch;

    #[test]
    fn every_architecture_is_read_back_from_its_name() {
        for &arch in NvvmArch::ALL {
            assert_eq!(arch.name().parse::<NvvmArch>().unwrap(), arch);
        }
        assert_eq!("compute_90a".parse::<NvvmArch>().unwrap(), NvvmArch::Compute90a);
        assert_eq!("100".parse::<NvvmArch>().unwrap(), NvvmArch::Compute100);
    }

    #[test]
    fn an_unknown_architecture_is_named_with_those_that_exist() {
        let message = "sm_91".parse::<NvvmArch>().unwrap_err().to_string();
        assert!(message.contains("sm_91") && message.contains("sm_90a"), "{message}");
    }

    #[test]
    fn ptx_is_new_enough_for_nccl_and_for_the_architecture() {
        assert_eq!(NvvmArch::Compute90.ptx_feature(), "+ptx86");
        assert_eq!(NvvmArch::Compute103.ptx_feature(), "+ptx88");
        assert_eq!(NvvmArch::Compute120a.oldest_ptxas(), (12, 8));
        assert_eq!(NvvmArch::Compute103a.oldest_ptxas(), (12, 9));
    }
}
