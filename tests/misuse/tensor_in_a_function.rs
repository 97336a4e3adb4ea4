// E0277: cannot be shared between threads safely
// A tensor that is kept in the state instead of by `saver.save` would keep its graph alive, and
// several threads would read it.
use tch_extension::Result;
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors};
use tch_extension::tch::Tensor;

struct Hidden {
    x: Option<Tensor>,
}

impl Function for Hidden {
    const NAME: &'static str = "hidden";
    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        self.x = Some(inputs.get(0)?.shallow_clone());
        Ok(inputs.get(0)?.detach().into())
    }
    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok(grads.get(0)?.shallow_clone().into())
    }
}

fn main() {}
