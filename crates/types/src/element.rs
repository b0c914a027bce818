//! The numeric types of kernel arguments and collectives.

use half::{bf16, f16};

pub use float8::{F8E4M3, F8E5M2};

/// A numeric type that NCCL knows. NCCL: `ncclDataType_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclDataType_t")]
#[expect(missing_docs, reason = "each name is the type")]
pub enum DataType {
    Int8 = 0,
    Uint8 = 1,
    Int32 = 2,
    Uint32 = 3,
    Int64 = 4,
    Uint64 = 5,
    Float16 = 6,
    Float32 = 7,
    Float64 = 8,
    Bfloat16 = 9,
    Float8e4m3 = 10,
    Float8e5m2 = 11,
}

impl DataType {
    /// All types; a type's index is its number in NCCL.
    pub const ALL: [Self; 12] = [
        Self::Int8,
        Self::Uint8,
        Self::Int32,
        Self::Uint32,
        Self::Int64,
        Self::Uint64,
        Self::Float16,
        Self::Float32,
        Self::Float64,
        Self::Bfloat16,
        Self::Float8e4m3,
        Self::Float8e5m2,
    ];

    /// NCCL: `ncclChar`.
    #[doc(alias = "ncclChar")]
    #[expect(non_upper_case_globals, reason = "NCCL's other name of a type")]
    pub const Char: Self = Self::Int8;
    /// NCCL: `ncclInt`.
    #[doc(alias = "ncclInt")]
    #[expect(non_upper_case_globals, reason = "as above")]
    pub const Int: Self = Self::Int32;
    /// NCCL: `ncclHalf`.
    #[doc(alias = "ncclHalf")]
    #[expect(non_upper_case_globals, reason = "as above")]
    pub const Half: Self = Self::Float16;
    /// NCCL: `ncclFloat`.
    #[doc(alias = "ncclFloat")]
    #[expect(non_upper_case_globals, reason = "as above")]
    pub const Float: Self = Self::Float32;
    /// NCCL: `ncclDouble`.
    #[doc(alias = "ncclDouble")]
    #[expect(non_upper_case_globals, reason = "as above")]
    pub const Double: Self = Self::Float64;

    /// Returns the type of this name: one of NCCL's (`ncclBfloat16`), with or without `nccl`; of
    /// torch's (`torch.bfloat16`), with or without `torch.`; or of Rust's (`bf16`).
    ///
    /// ```
    /// use devcomm_types::DataType;
    ///
    /// for name in ["torch.float16", "half", "ncclHalf", "f16"] {
    ///     assert_eq!(DataType::from_name(name), Some(DataType::Float16));
    /// }
    /// assert_eq!(DataType::from_name("torch.complex64"), None);
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let nccl = name.strip_prefix("nccl");
        let torch = name.strip_prefix("torch.").unwrap_or(name);
        Some(match nccl.unwrap_or(torch) {
            "Int8" | "Char" | "int8" | "i8" => Self::Int8,
            "Uint8" | "uint8" | "u8" => Self::Uint8,
            "Int32" | "Int" | "int32" | "int" | "i32" => Self::Int32,
            "Uint32" | "uint32" | "u32" => Self::Uint32,
            "Int64" | "int64" | "long" | "i64" => Self::Int64,
            "Uint64" | "uint64" | "u64" => Self::Uint64,
            "Float16" | "Half" | "float16" | "half" | "f16" => Self::Float16,
            "Float32" | "Float" | "float32" | "float" | "f32" => Self::Float32,
            "Float64" | "Double" | "float64" | "double" | "f64" => Self::Float64,
            "Bfloat16" | "bfloat16" | "bf16" => Self::Bfloat16,
            "Float8e4m3" | "float8_e4m3fn" | "f8e4m3" => Self::Float8e4m3,
            "Float8e5m2" | "float8_e5m2" | "f8e5m2" => Self::Float8e5m2,
            _ => return None,
        })
    }

    /// Returns the size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 | Self::Float8e4m3 | Self::Float8e5m2 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }
}

/// An element type of windows and collectives.
///
/// # Safety
///
/// The type is plain old data (every bit pattern valid, no padding) and `DATA_TYPE.size()` is its
/// size in bytes.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// NCCL's data type.
    const DATA_TYPE: DataType;
    /// The type's name in the entry point names of kernels, for example `f32`.
    const NAME: &'static str;
}

macro_rules! elements {
    ($($type:ty = $tag:ident $name:literal),* $(,)?) => { $(
        // SAFETY: the type is a primitive number or a transparent wrapper of an integer (half's,
        // float8's); its size is asserted below.
        unsafe impl Element for $type {
            const DATA_TYPE: DataType = DataType::$tag;
            const NAME: &'static str = $name;
        }
        const _: () = assert!(size_of::<$type>() == DataType::$tag.size());
    )* };
}

elements! {
    i8 = Int8 "i8", u8 = Uint8 "u8", i32 = Int32 "i32", u32 = Uint32 "u32", i64 = Int64 "i64",
    u64 = Uint64 "u64",
    f16 = Float16 "f16", f32 = Float32 "f32", f64 = Float64 "f64", bf16 = Bfloat16 "bf16",
    F8E4M3 = Float8e4m3 "f8e4m3", F8E5M2 = Float8e5m2 "f8e5m2",
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    /// Returns the data type, the size and the name of `T`.
    fn properties<T: Element>() -> (DataType, usize, &'static str) {
        (T::DATA_TYPE, size_of::<T>(), T::NAME)
    }

    #[test]
    fn both_eight_bit_floats_are_elements_of_one_byte_that_keep_every_bit_pattern() {
        assert_eq!(properties::<F8E4M3>(), (DataType::Float8e4m3, 1, "f8e4m3"));
        assert_eq!(properties::<F8E5M2>(), (DataType::Float8e5m2, 1, "f8e5m2"));
        assert_eq!((align_of::<F8E4M3>(), align_of::<F8E5M2>()), (1, 1));
        for bits in 0..=u8::MAX {
            assert_eq!(F8E4M3::from_bits(bits).to_bits(), bits);
            assert_eq!(F8E5M2::from_bits(bits).to_bits(), bits);
        }
    }

    #[test]
    fn a_type_has_the_names_of_nccl_torch_and_rust() {
        let of_elements = [
            i8::NAME,
            u8::NAME,
            i32::NAME,
            u32::NAME,
            i64::NAME,
            u64::NAME,
            f16::NAME,
            f32::NAME,
            f64::NAME,
            bf16::NAME,
            F8E4M3::NAME,
            F8E5M2::NAME,
        ];
        let of_torch = [
            "torch.int8",
            "torch.uint8",
            "torch.int32",
            "torch.uint32",
            "torch.int64",
            "torch.uint64",
            "torch.float16",
            "torch.float32",
            "torch.float64",
            "torch.bfloat16",
            "torch.float8_e4m3fn",
            "torch.float8_e5m2",
        ];
        for (data_type, names) in DataType::ALL.into_iter().zip(of_elements.iter().zip(of_torch)) {
            assert_eq!(DataType::from_name(names.0), Some(data_type));
            assert_eq!(DataType::from_name(names.1), Some(data_type));
            let own = std::format!("nccl{data_type:?}");
            assert_eq!(DataType::from_name(&own), Some(data_type));
        }
        for other in ["", "nccl", "torch.", "ncclf33", "float8_e4m3fnuz", "bool"] {
            assert_eq!(DataType::from_name(other), None, "{other}");
        }
    }

    #[test]
    fn eight_bit_floats_have_the_ranges_of_their_formats() {
        assert_eq!(F8E4M3::from_bits(0x7e).to_f32(), 448.0);
        assert_eq!(F8E5M2::from_bits(0x7b).to_f32(), 57344.0);
        assert_eq!(
            (F8E4M3::from_f32(-1.5).to_f32(), F8E5M2::from_f32(-1.5).to_f32()),
            (-1.5, -1.5)
        );
    }
}
