//! Inputs that are worth testing an operator with.

use super::replica::no_value;
use crate::Result;
use tch::{Device, Kind, Tensor};

/// The layout of a tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Row-major, without gaps.
    Contiguous,
    /// The first and the last dimension are swapped, so that columns are contiguous.
    Transposed,
    /// Every second element of the rows of a wider tensor, starting with its second element.
    Strided,
    /// Row-major, but starting one element into the memory, so that the address is not a multiple
    /// of a vector's size.
    Offset,
    /// The first part along the first dimension, repeated without a copy.
    Expanded,
}

impl Layout {
    /// All layouts.
    pub const ALL: [Layout; 5] =
        [Layout::Contiguous, Layout::Transposed, Layout::Strided, Layout::Offset, Layout::Expanded];

    /// A tensor of this layout with the values, kind and device of `values`. For
    /// [`Layout::Expanded`], the values of the first part are repeated. The memory around and
    /// between the elements holds NaN, or the kind's largest value, so that a kernel which reads
    /// there gives itself away.
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_extension::testing::Layout;
    ///
    /// let values = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
    /// let strided = Layout::Strided.of(&values)?;
    /// assert_eq!((&strided, strided.stride()), (&values, vec![7, 2]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn of(self, values: &Tensor) -> Result<Tensor> {
        let values = values.f_detach()?;
        let size = values.size();
        if size.is_empty() {
            return if self == Layout::Offset { offset(&values) } else { contiguous(&values) };
        }
        let last = size.len() - 1;
        match self {
            Layout::Contiguous => contiguous(&values),
            Layout::Transposed => {
                let turned = contiguous(&values.f_transpose(0, last as i64)?)?;
                Ok(turned.f_transpose(0, last as i64)?)
            }
            Layout::Strided => {
                let mut wide = size.clone();
                wide[last] = 2 * size[last] + 1;
                let gaps =
                    no_value(&wide, &values)?.f_slice(last as i64, 1, 2 * size[last] + 1, 2)?;
                filled(gaps, &values)
            }
            Layout::Offset => offset(&values),
            Layout::Expanded if size[0] == 0 => contiguous(&values),
            Layout::Expanded => Ok(contiguous(&values.f_narrow(0, 0, 1)?)?.f_expand(&size, false)?),
        }
    }
}

fn contiguous(values: &Tensor) -> Result<Tensor> {
    filled(no_value(&values.size(), values)?, values)
}

/// Makes a tensor with one element of memory before it and one after it.
fn offset(values: &Tensor) -> Result<Tensor> {
    let len = values.numel() as i64;
    let memory = no_value(&[len + 2], values)?;
    filled(memory.f_narrow(0, 1, len)?.f_view(values.size().as_slice())?, values)
}

fn filled(mut place: Tensor, values: &Tensor) -> Result<Tensor> {
    place.f_copy_(values)?;
    Ok(place.f_detach()?)
}

/// The shape of one input in a [`SampleTable`], and the scale of its values.
#[derive(Clone, Debug)]
pub struct Shape {
    size: Vec<i64>,
    scale: f64,
}

impl Shape {
    /// An input of this size with values between -1 and 1.
    pub fn new(size: impl Into<Vec<i64>>) -> Self {
        Shape { size: size.into(), scale: 1.0 }
    }

    /// Makes the values lie between `-scale` and `scale`. Use it for a weight, so that sums do not
    /// grow with their length.
    pub fn scale(self, scale: f64) -> Self {
        Shape { scale, ..self }
    }
}

/// One set of inputs.
#[derive(Debug)]
pub struct Sample {
    /// What is special about it, such as `B=3 F=8 H=5, input 1 strided`.
    pub name: String,
    /// The inputs, with the requested kind and device.
    pub inputs: Vec<Tensor>,
}

impl Sample {
    /// The same values and layouts as leaves that require grad, for
    /// [`gradcheck`](super::gradcheck()) and [`conformance`](super::conformance()). An expanded
    /// input becomes contiguous: gradcheck moves one element at a time, so no two elements may
    /// share memory.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn leaves(&self) -> Result<Vec<Tensor>> {
        let leaf = |input: &Tensor| {
            let expanded = input
                .size()
                .iter()
                .zip(input.stride())
                .any(|(&size, stride)| size > 1 && stride == 0);
            let input = if expanded { contiguous(input)? } else { input.f_detach()? };
            Ok(input.f_set_requires_grad(true)?)
        };
        self.inputs.iter().map(leaf).collect()
    }
}

/// A table of inputs for an operator, made from the names of its dimensions and the shapes of its
/// inputs. It has all the sizes that kernels often get wrong, and every layout.
///
/// [`SampleTable::new`] varies one dimension at a time: sizes around those of vectors, one, and
/// zero, while the other dimensions are small and differ from one another. Then it applies each
/// [`Layout`] to all inputs at once, and to each input alone. All samples are small enough for the
/// whole Jacobian of a gradcheck. The values are always the same, whatever the kind and device, and
/// none is drawn from libtorch's random state. For integer kinds the fractions are dropped, so give
/// such an input a scale. For `Bool`, an element is true if its value is positive.
///
/// ```
/// use tch::{Device, Kind};
/// use tch_extension::testing::{SampleTable, Shape, gradcheck};
///
/// let table = SampleTable::new(["B", "F"], |[b, f]| vec![Shape::new([b, f]), Shape::new([f])]);
/// for sample in table.samples(Kind::Double, Device::Cpu)? {
///     let leaves = sample.leaves()?;
///     let inputs: Vec<_> = leaves.iter().collect();
///     gradcheck(|inputs| Ok(&inputs[0] * &inputs[1]), &inputs, &Default::default())
///         .unwrap_or_else(|error| panic!("{}: {error}", sample.name));
/// }
/// # Ok::<(), tch_extension::Error>(())
/// ```
pub struct SampleTable<const N: usize, F> {
    dims: [&'static str; N],
    shapes: F,
    rows: Vec<([i64; N], Arrangement)>,
}

/// Which inputs have which layout.
#[derive(Clone, Copy)]
enum Arrangement {
    All(Layout),
    Only(usize, Layout),
}

/// The sizes of the dimensions that are not varied. They are repeated if there are more dimensions.
const MODERATE: [i64; 4] = [3, 4, 5, 2];

/// Zero, one, a vector of 16 bytes of any kind give or take one element, and one more than the
/// CPU's widest vector.
const RAGGED: [i64; 7] = [0, 1, 7, 8, 9, 16, 17];

impl<const N: usize, F> SampleTable<N, F>
where
    F: Fn([i64; N]) -> Vec<Shape>,
{
    /// Makes the table of an operator whose dimensions have these names. `shapes` returns the
    /// shapes of its inputs for given sizes of the dimensions.
    pub fn new(dims: [&'static str; N], shapes: F) -> Self {
        let moderate: [i64; N] = std::array::from_fn(|dim| MODERATE[dim % MODERATE.len()]);
        let mut table = SampleTable { dims, shapes, rows: Vec::new() };
        table = table.with_sizes(&[moderate]);
        for dim in 0..N {
            for size in RAGGED {
                let mut sizes = moderate;
                sizes[dim] = size;
                table = table.with_sizes(&[sizes]);
            }
        }
        // The last dimension is a whole number of vectors here, so that the layout alone decides
        // which path a kernel takes.
        let whole = std::array::from_fn(|dim| if dim + 1 == N { 8 } else { moderate[dim] });
        table.with_layouts(moderate).with_layouts(whole)
    }

    /// Makes a table without rows, for sizes of your own.
    pub fn empty(dims: [&'static str; N], shapes: F) -> Self {
        SampleTable { dims, shapes, rows: Vec::new() }
    }

    /// Adds sizes, with contiguous inputs.
    pub fn with_sizes(mut self, sizes: &[[i64; N]]) -> Self {
        self.rows.extend(sizes.iter().map(|&sizes| (sizes, Arrangement::All(Layout::Contiguous))));
        self
    }

    /// Adds these sizes in every other layout, for all inputs at once and for each input alone.
    pub fn with_layouts(mut self, sizes: [i64; N]) -> Self {
        let inputs = (self.shapes)(sizes).len();
        for layout in Layout::ALL.into_iter().filter(|&layout| layout != Layout::Contiguous) {
            self.rows.push((sizes, Arrangement::All(layout)));
            if inputs > 1 {
                self.rows
                    .extend((0..inputs).map(|input| (sizes, Arrangement::Only(input, layout))));
            }
        }
        self
    }

    /// Makes the inputs of every row.
    ///
    /// # Errors
    /// An error of libtorch, for example when memory runs out.
    pub fn samples(&self, kind: Kind, device: Device) -> Result<Vec<Sample>> {
        self.rows.iter().map(|row| self.sample(*row, kind, device)).collect()
    }

    fn sample(
        &self,
        (sizes, arrangement): ([i64; N], Arrangement),
        kind: Kind,
        device: Device,
    ) -> Result<Sample> {
        let sizes_named = self.dims.iter().zip(sizes).map(|(name, size)| format!("{name}={size}"));
        let name = sizes_named.collect::<Vec<_>>().join(" ");
        let name = match arrangement {
            Arrangement::All(layout) => format!("{name}, {layout:?}"),
            Arrangement::Only(input, layout) => format!("{name}, input {input} {layout:?}"),
        };
        let shapes = (self.shapes)(sizes);
        let inputs = shapes.iter().enumerate().map(|(index, shape)| {
            let layout = match arrangement {
                Arrangement::All(layout) => layout,
                Arrangement::Only(input, layout) if input == index => layout,
                Arrangement::Only(..) => Layout::Contiguous,
            };
            let values = noise(&shape.size, index)?.f_mul_scalar(shape.scale)?;
            let values =
                if kind == Kind::Bool { values.f_gt(0.0)? } else { values.f_to_kind(kind)? };
            layout.of(&values.f_to_device(device)?)
        });
        Ok(Sample { name, inputs: inputs.collect::<Result<_>>()? })
    }
}

/// Numbers between -1 and 1 that look random but are always the same, of kind `Double`, on the CPU.
/// Another `seed` gives other numbers.
pub(super) fn noise(size: &[i64], seed: usize) -> Result<Tensor> {
    // SplitMix64: each bit of the state affects every bit of the number.
    let len = size.iter().product::<i64>();
    let number = |index: i64| {
        let state = (index as u64 + 1)
            .wrapping_add((seed as u64) << 32)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    let numbers: Vec<f64> = (0..len).map(number).collect();
    Ok(Tensor::f_from_slice(&numbers)?.f_reshape(size)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values() -> Tensor {
        Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4])
    }

    #[test]
    fn layouts_are_what_they_say() {
        let strides = [[4, 1], [1, 3], [9, 2], [4, 1], [0, 1]];
        for (layout, stride) in Layout::ALL.into_iter().zip(strides) {
            let tensor = layout.of(&values()).unwrap();
            assert_eq!(tensor.stride(), stride, "{layout:?}");
            let expected = if layout == Layout::Expanded {
                values().narrow(0, 0, 1).expand([3, 4], false)
            } else {
                values()
            };
            assert_eq!(tensor, expected, "{layout:?}");
        }
        let offset = Layout::Offset.of(&values()).unwrap();
        assert_ne!(offset.data_ptr() as usize % 8, 0);
    }

    #[test]
    fn gaps_are_no_numbers() {
        for layout in [Layout::Strided, Layout::Offset] {
            let tensor = layout.of(&values()).unwrap();
            let before = tensor.as_strided([1], [1], 0);
            assert!(before.double_value(&[0]).is_nan(), "{layout:?}");
            let whole = if layout == Layout::Strided { 27 } else { 14 };
            let memory = tensor.as_strided([whole], [1], 0);
            assert_eq!(memory.isnan().sum(Kind::Int64).int64_value(&[]), whole - 12, "{layout:?}");
        }
        let integers = Layout::Offset.of(&values().to_kind(Kind::Int64)).unwrap();
        assert_eq!(integers.as_strided([1], [1], 0).int64_value(&[0]), i64::MAX);
    }

    #[test]
    fn every_rank_and_nothing_at_all() {
        for size in [&[][..], &[5], &[0], &[2, 0, 3], &[2, 3, 4]] {
            let values = noise(size, 0).unwrap();
            for layout in Layout::ALL {
                let tensor = layout.of(&values).unwrap();
                assert_eq!(tensor.size(), size, "{layout:?}");
                assert!(layout == Layout::Expanded || tensor == values, "{layout:?} {size:?}");
            }
        }
    }

    #[test]
    fn noise_is_noise() {
        let noise_of = |seed| noise(&[1000], seed).unwrap();
        let sample = noise_of(0);
        assert_eq!(sample, noise_of(0));
        assert!(sample.mean(Kind::Double).double_value(&[]).abs() < 0.1);
        assert!((sample.square().mean(Kind::Double).double_value(&[]) - 1.0 / 3.0).abs() < 0.05);
        assert!(sample.abs().max().double_value(&[]) <= 1.0);
        let product = (noise_of(1) * &sample).mean(Kind::Double).double_value(&[]);
        assert!(product.abs() < 0.05, "{product}");
        let shifted = (sample.narrow(0, 1, 999) * sample.narrow(0, 0, 999)).mean(Kind::Double);
        assert!(shifted.double_value(&[]).abs() < 0.05);
    }

    #[test]
    fn a_table_has_every_size_and_layout() {
        let table = SampleTable::new(["B", "F"], |[b, f]| {
            vec![Shape::new([b, f]).scale(0.5), Shape::new([f])]
        });
        let samples = table.samples(Kind::Half, Device::Cpu).unwrap();
        // One row of moderate sizes, the varied sizes of two dimensions, and four layouts in three
        // arrangements for two sizes.
        assert_eq!(samples.len(), 1 + 2 * RAGGED.len() + 2 * 4 * 3);
        assert!(samples.iter().any(|sample| sample.inputs[0].size() == [0, 4]));
        assert!(samples.iter().any(|sample| sample.inputs[0].size() == [3, 17]));
        let find = |name: &str| {
            samples.iter().find(|sample| sample.name == name).unwrap_or_else(|| panic!("no {name}"))
        };
        let strided = &find("B=3 F=8, input 0 Strided").inputs;
        assert_eq!((strided[0].stride(), strided[1].stride()), (vec![17, 2], vec![1]));
        assert!(strided.iter().all(|input| input.kind() == Kind::Half));
        assert!(strided[0].abs().max().double_value(&[]) <= 0.5);
        let leaves = find("B=3 F=4, Expanded").leaves().unwrap();
        assert!(leaves.iter().all(|leaf| leaf.requires_grad() && leaf.is_leaf()));
        assert_eq!((leaves[0].stride(), leaves[1].stride()), (vec![4, 1], vec![1]));
        assert_eq!(find("B=3 F=4, Transposed").leaves().unwrap()[0].stride(), [1, 3]);
        let bools = table.samples(Kind::Bool, Device::Cpu).unwrap();
        assert!(bools.iter().all(|sample| sample.inputs[0].kind() == Kind::Bool));
        let bools = &bools[0].inputs[0];
        assert!(
            bools.any().int64_value(&[]) == 1 && bools.all().int64_value(&[]) == 0,
            "both values"
        );
        let other = table.samples(Kind::Double, Device::Cpu).unwrap();
        assert_eq!(other[0].inputs[1].to_kind(Kind::Half), samples[0].inputs[1]);
    }
}
